# SPDX-License-Identifier: Apache-2.0
"""The fork's wheel: metadata, RECORD, and the same bytes every time."""

import dataclasses
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.fork.wheel import (
    build_fork,
    fetch_release,
    verify_record,
)


@pytest.fixture(scope="module")
def wheel(series, release, tmp_path_factory):
    return build_fork(series, release, tmp_path_factory.mktemp("fork"))


def files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {i.filename: archive.read(i) for i in archive.infolist() if not i.is_dir()}


def modes(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {i.filename: i.external_attr >> 16 for i in archive.infolist() if not i.is_dir()}


def rewrite(wheel, target, change):
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in change(files(wheel)).items():
            archive.writestr(name, content)
    return target


def test_two_builds_are_the_same_bytes(series, release, wheel, tmp_path):
    assert build_fork(series, release, tmp_path).read_bytes() == wheel.read_bytes()


def test_a_build_leaves_the_wheel_alone_in_its_directory(wheel):
    assert list(wheel.parent.iterdir()) == [wheel]


def test_only_patched_files_and_the_metadata_differ_from_the_release(series, release, wheel):
    old, new = files(release), files(wheel)
    info = f"megatron_core-{series.upstream.version}.dist-info"
    new_info = f"megatron_core-{series.upstream.local_version}.dist-info"
    renamed = {name.replace(info, new_info): content for name, content in old.items()}
    touched = {change.path for patch in series.patches for change in patch.changes}
    differing = {name for name in renamed | new if renamed.get(name) != new.get(name)}
    assert differing == touched | {f"{new_info}/METADATA", f"{new_info}/RECORD"}
    assert renamed[f"{new_info}/WHEEL"] == new[f"{new_info}/WHEEL"]
    old_modes = {name.replace(info, new_info): mode for name, mode in modes(release).items()}
    kept = {name: mode for name, mode in modes(wheel).items() if name in old_modes}
    del kept[f"{new_info}/RECORD"], old_modes[f"{new_info}/RECORD"]
    assert kept == old_modes


def test_record_lists_every_file_with_digest_and_size(wheel):
    verify_record(wheel)


def test_a_changed_file_and_an_unlisted_file_break_the_record(wheel, tmp_path):
    def tamper(content):
        content["megatron/core/__init__.py"] += b"\n"
        return content

    def add(content):
        return content | {"megatron/core/extra.py": b""}

    with pytest.raises(UserError, match=r"wrong about megatron/core/__init__\.py"):
        verify_record(rewrite(wheel, tmp_path / "a.whl", tamper))
    with pytest.raises(UserError, match=r"megatron/core/extra\.py"):
        verify_record(rewrite(wheel, tmp_path / "b.whl", add))


def test_pip_installs_it_as_a_version_that_the_package_accepts(series, wheel, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", tmp_path, wheel], check=True)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("megatron-core", series.upstream.local_version)
    specifiers = pytest.importorskip("packaging.specifiers")
    assert found.version in specifiers.SpecifierSet(">=0.16.1,<0.17")


def test_a_release_that_is_kept_is_not_downloaded_again(series, release, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert fetch_release(series.upstream, release.parents[1]) == release


def test_a_release_with_another_digest_is_refused(series, release, tmp_path):
    kept = tmp_path / release.parent.name / release.name
    kept.parent.mkdir()
    shutil.copy(release, kept)
    pinned = dataclasses.replace(series.upstream, wheel_sha256={release.name: "0" * 64})
    with pytest.raises(UserError, match="not the pinned 0000"):
        fetch_release(pinned, tmp_path)


def test_a_failing_pip_is_one_line(series, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="pip could not download megatron-core") as caught:
        fetch_release(series.upstream, tmp_path)
    assert "\n" not in str(caught.value)
