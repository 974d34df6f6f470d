# SPDX-License-Identifier: Apache-2.0
"""A killed campaign goes on where it was."""

import re
import subprocess
import sys

import pytest

TESTS = """
import os, pytest
def test_first(): pass
def test_wrong(): assert False
@pytest.fixture
def leaking():
    yield
    assert False
def test_leaks(leaking): pass
@pytest.mark.parametrize("name", ["a b", "c"])
def test_named(name): pass
def test_killed():
    if os.environ.get("KILL"):
        os.kill(os.getpid(), 9)
def test_last(): pass
"""


@pytest.fixture
def campaign(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(**environment):
        plugin = ("-p", "tests.harness.passed_tests", "--passed-tests", "state/passed")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, "-v"]
        result = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": ":".join(sys.path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        outcome = r"^test_it\.py::(.+ (?:PASSED|FAILED|ERROR))\b"
        return re.findall(outcome, result.stdout, re.MULTILINE)

    return run


def test_what_has_passed_is_not_run_again(campaign, tmp_path):
    first = campaign(KILL="1")
    assert first[:2] == ["test_first PASSED", "test_wrong FAILED"]
    with (tmp_path / "state" / "passed").open("a") as file:
        file.write("test_it.py::test_la")  # half a line
    rest = ["test_wrong FAILED", "test_leaks PASSED", "test_leaks ERROR"]
    assert campaign() == [*rest, "test_killed PASSED", "test_last PASSED"]
    assert campaign() == rest
