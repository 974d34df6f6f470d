"""The package imports what it declares: neither the tests nor what tests alone need."""

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = packages_distributions()
MODULES = [ROOT / "pretrain_moe.py", *sorted((ROOT / "megatron_moevement").rglob("*.py"))]


def normal(name):
    """Returns the one of the spellings of a distribution that all others stand for."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def declared():
    """Returns the distributions that a user installs, extras included, that of tests apart."""
    extras = {**PROJECT["optional-dependencies"]}
    del extras["test"]
    lines = [line for group in (PROJECT["dependencies"], *extras.values()) for line in group]
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in [PROJECT["name"], *lines]}


def imported(source):
    """Yields the top-level names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module.partition(".")[0]


def undeclared(source):
    """Returns the imported names that come with nothing that is declared."""
    return {
        name
        for name in set(imported(source)) - sys.stdlib_module_names
        if not declared() & {normal(each) for each in DISTRIBUTIONS.get(name, [name])}
    }


def test_the_package_imports_nothing_that_is_for_tests():
    found = {str(path.relative_to(ROOT)): undeclared(path.read_text("utf-8")) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("name", ["hypothesis", "psutil", "pytest", "tests"])
def test_an_import_for_tests_is_found(name):
    assert undeclared(f"import numpy\ndef f():\n    from {name}.harness import g") == {name}
