# SPDX-License-Identifier: Apache-2.0
"""What `pip install .` and a source distribution carry."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from megatron_moevement import __version__
from megatron_moevement.cli.scripts import SCRIPTS
from megatron_moevement.integrations.megatron.fork.series import load_series, series_directory

ROOT = Path(__file__).resolve().parents[2]
FORK = "megatron_moevement/integrations/megatron/fork"


def build(source, kind, out):
    """Runs this environment's build backend as pip does, in a copy of the source."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files of the repository, without what earlier builds left in it."""
    directory = tmp_path_factory.mktemp("source") / "tree"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_the_patches_and_the_type_marker(source, wheel):
    modules = {
        file.relative_to(source).as_posix()
        for file in (source / "megatron_moevement").rglob("*.py")
    }
    patches = {f"{FORK}/patches/{file.parent.name}/{file.name}" for file in patch_files()}
    assert len(patches) >= 4
    scripts = {f"megatron_moevement/scripts/{name}" for name in SCRIPTS}
    page = {f"megatron_moevement/cli/page/{file.name}" for file in page_files(source)}
    assert len(page) >= 4
    others = {"pretrain_moe.py", "megatron_moevement/py.typed"}
    expected = modules | patches | scripts | page | others
    files = {name for name in names(wheel) if ".dist-info/" not in name}
    assert files == expected


def page_files(source):
    return list((source / "megatron_moevement" / "cli" / "page").iterdir())


def patch_files():
    return [file for file in series_directory().iterdir() if file.is_file()]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Returns a folder with the contents of the wheel, and no repository around it."""
    site = tmp_path_factory.mktemp("installed") / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="module")
def fresh(source, tmp_path_factory):
    """Returns an environment into which `pip install .` put the package, beside our libraries."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    libraries = folder / "libraries"
    libraries.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "megatron_moevement" not in path.name and path.suffix != ".pth":
            (libraries / path.name).symlink_to(path)
    python = folder / "venv" / "bin" / "python"
    site = ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))", folder)
    Path(site, "libraries.pth").write_text(f"{libraries}\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index"]
    command += ["--disable-pip-version-check", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(command, cwd=source, env=plain(), check=True, capture_output=True)
    return python.parent


def plain():
    """Returns the environment without what has Python find the repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def ask(python, code, folder):
    command = [python, "-c", code]
    told = subprocess.run(
        command, cwd=folder, env=plain(), check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def test_pip_installs_it_and_it_runs_without_the_repository(fresh, tmp_path):
    def moevement(*words):
        command = [fresh / "moevement", *words]
        told = subprocess.run(command, cwd=tmp_path, env=plain(), check=True, capture_output=True)
        return told.stdout.decode()

    where = "import megatron_moevement, pretrain_moe; print(megatron_moevement.__file__)"
    assert ask(fresh / "python", where, tmp_path).startswith(str(fresh.parent))
    assert f"moevement {__version__} (megatron-core 0.16.1+moevement." in moevement("--version")
    assert "usage: moevement launch -n N" in moevement("launch", "--help")
    for name in SCRIPTS:
        assert moevement("scripts", name) == (ROOT / "scripts" / name).read_text()


@pytest.mark.distributed
def test_an_installed_package_starts_the_ranks_of_a_job(fresh, tmp_path):
    """They parse all flags and find the fork: what is wrong is refused by the program."""
    command = [fresh / "moevement", "launch", "-n", "1", "--json", "--", "--num-layers", "2"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=plain(), check=False, capture_output=True, text=True
    )
    assert (ended.returncode, json.loads(ended.stdout)["code"]) == (2, 2)
    assert "pretrain_moe.py: " in ended.stderr
    assert "--micro-batch-size" in ended.stderr


def test_an_installed_package_prints_its_scripts(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "megatron_moevement.cli", "scripts"]
    for name in SCRIPTS:
        told = subprocess.run(
            [*command, name], cwd=tmp_path, env=environment, check=True, capture_output=True
        )
        assert told.stdout == (ROOT / "scripts" / name).read_bytes()
    listed = subprocess.run(
        [*command, "--json"], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    paths = {each["path"] for each in json.loads(listed.stdout).values()}
    assert paths == {str(installed / "megatron_moevement" / "scripts" / name) for name in SCRIPTS}


def test_a_script_without_a_repository_starts_the_installed_program(installed, tmp_path):
    shutil.copy(ROOT / "scripts" / "run_ft_launcher.sh", tmp_path)
    agent = tmp_path / "ft_launcher"
    agent.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    agent.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = os.environ | {
        "PYTHONPATH": str(installed),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    command = ["bash", tmp_path / "run_ft_launcher.sh", "-n", "2", "--", "--seed", "3"]
    told = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert told.stdout.splitlines()[-3:] == [str(installed / "pretrain_moe.py"), "--seed", "3"]


def test_the_fork_can_be_built_from_an_installed_package(installed, tmp_path):
    module = "megatron_moevement.integrations.megatron.fork"
    cache = ROOT / "build" / "fork" / "release"
    command = [sys.executable, "-m", module, "build", "--cache", cache, "--out", tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    (built,) = (tmp_path / "out").iterdir()
    assert f"+moevement.{load_series().upstream.fork_version}-" in built.name


@pytest.mark.parametrize(("version", "fits"), [("2.14.0a0+nv26.08", True), ("2.13.0a0", False)])
def test_an_image_whose_torch_does_not_fit_is_not_built(tmp_path, version, fits):
    script = (ROOT / "Dockerfile").read_text()
    script = re.search(
        r"RUN (python -c 'import sys, tomllib.*?')$", script, re.DOTALL | re.MULTILINE
    )
    metadata = tmp_path / "torch-1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PATH": path}
    command = ["bash", "-c", script[1]]
    built = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert (built.returncode == 0) is fits, built.stderr
    assert ("torch>=2.13 is needed" in built.stderr) is not fits


def test_a_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    (tmp_path / "sdist").mkdir()
    (tmp_path / "wheel").mkdir()
    with tarfile.open(build(source, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("megatron_moevement-*")
    assert names(build(unpacked, "wheel", tmp_path / "wheel")) == names(wheel)
