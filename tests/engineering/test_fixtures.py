# SPDX-License-Identifier: Apache-2.0
"""Each fixture that a test asks for exists, also of tests that only a campaign runs.

Tests that are deselected are collected all the same: `tests/conftest.py` looks at all of them. A
name that is made up while a test runs escapes it, so there is none.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HEAD = """
import pytest
@pytest.fixture
def of_another(absent): pass
@pytest.fixture
def there(request, tmp_path): return request.param
@pytest.mark.parametrize("there", [1], indirect=True)
@pytest.mark.parametrize("given", [1])
def test_quick(given, there, request, fail_on_leaks): pass
"""
SLOW = "@pytest.mark.slow\n{mark}\ndef test_slow({arguments}): pass\n"


@pytest.fixture
def run_quick_tests(tmp_path):
    """Returns a function that runs the tests of a text, under the project's conftest."""

    def run(text):
        (tmp_path / "test_it.py").write_text(text)
        return subprocess.run(
            (sys.executable, "-m", "pytest", "-p", "tests.conftest", "-m", "not slow"),
            cwd=tmp_path,
            env={"PYTHONPATH": ":".join((str(TESTS.parent), *sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_tests_with_all_their_fixtures_run(run_quick_tests):
    done = run_quick_tests(HEAD + SLOW.format(mark="", arguments="tmp_path"))
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 deselected" in done.stdout


@pytest.mark.parametrize(
    ("mark", "arguments", "missing"),
    [
        ("", "mishap", "mishap"),
        ("", "tmp_path, of_another", "absent"),
        ("@pytest.mark.usefixtures('missing')", "", "missing"),
    ],
)
def test_a_slow_test_without_one_of_its_fixtures_ends_the_run(
    run_quick_tests, mark, arguments, missing
):
    done = run_quick_tests(HEAD + SLOW.format(mark=mark, arguments=arguments))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert f"test_it.py::test_slow: no fixture {missing}\n" in done.stderr


def asked_for(text):
    """Yields the names that `getfixturevalue` is given in a module; None for what is no literal."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getfixturevalue":
            yield getattr(node.args[0], "value", None)


def fixtures_in(text):
    """Yields the names of the fixtures that a module defines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            marks = [getattr(one, "func", one) for one in node.decorator_list]
            if any(getattr(mark, "attr", "") == "fixture" for mark in marks):
                yield node.name


def test_names_that_are_asked_for_in_a_test_are_literals_of_fixtures():
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    known = {name for text in texts.values() for name in fixtures_in(text)}
    asked = {str(path.relative_to(TESTS)): {*asked_for(text)} for path, text in texts.items()}
    assert {path: names - known for path, names in asked.items() if names - known} == {}
    assert any(asked.values())


def test_a_name_that_is_made_up_is_found():
    text = "@pytest.fixture(scope='module')\ndef one(request):\n    request.getfixturevalue(name)\n"
    assert [*asked_for(text)] == [None]
    assert [*fixtures_in(text)] == ["one"]
