# SPDX-License-Identifier: Apache-2.0
"""`scripts/setup.sh`: what it refuses, and that a second run does nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASICS = ("bash", "cat", "cut", "dirname", "find", "flock", "mkdir", "sed", "sha256sum", "sort")
INPUTS = ("constraints.txt", "constraints-cuda.txt", "pyproject.toml", "setup.py", "scripts")


@pytest.fixture
def set_up(tmp_path):
    """Runs a copy of the script, in a place with a space, where only some programs are found."""
    repository = tmp_path / "a clone"
    repository.mkdir()
    for name in (*INPUTS, "patches", "megatron_moevement/integrations/megatron/fork"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, repository / name)
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(*names, **variables):
        for name in (*BASICS, "xargs", *names):
            path = sys.executable if name == "python3" else shutil.which(name)
            wrapper = programs / name  # a script, for a venv's python must be run by its own path
            wrapper.write_text(f'#!/bin/sh\nexec "{path}" "$@"\n')
            wrapper.chmod(0o755)
        environment = {"PATH": str(programs), **variables}
        result = subprocess.run(
            [shutil.which("bash"), repository / "scripts" / "setup.sh"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not (repository / ".venv").exists()
        return result

    return run


def refusal(result):
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_a_machine_without_a_suitable_python_is_told_so(set_up):
    expected = (
        "setup: Python 3.11 or 3.12 is needed and none is on PATH: install one, or set PYTHON"
    )
    assert refusal(set_up()) == expected


def test_an_unsuitable_python_that_was_asked_for_is_not_replaced_by_another(set_up):
    line = refusal(set_up("python3", PYTHON="/bin/false"))
    assert line == "setup: PYTHON=/bin/false is not Python 3.11 or 3.12"


def test_a_machine_without_gcc_or_git_is_told_so(set_up):
    assert refusal(set_up("python3")) == "setup: gcc is needed and not on PATH: install it"
    assert refusal(set_up("python3", "gcc")) == "setup: git is needed and not on PATH: install it"


def test_a_second_run_says_and_does_nothing():
    stamp = ROOT / ".venv" / "moevement-setup.stamp"
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("these tests do not run in the environment of scripts/setup.sh")
    before = (stamp.read_text(), os.stat(stamp).st_mtime_ns)
    command = [ROOT / "scripts" / "setup.sh"]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
    assert (stamp.read_text(), os.stat(stamp).st_mtime_ns) == before
