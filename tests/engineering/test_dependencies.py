# SPDX-License-Identifier: Apache-2.0
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
    """Returns the distributions that a user installs, extras too, but those of tests and pages."""
    extras = {**PROJECT["optional-dependencies"]}
    del extras["docs"], extras["test"]
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


@pytest.mark.parametrize("name", ["hypothesis", "mypy", "pytest", "tests"])
def test_an_import_for_tests_is_found(name):
    assert undeclared(f"import numpy\ndef f():\n    from {name}.harness import g") == {name}


HOST_NAME = "gethostname"
"""What everybody may take from `socket`: it names a machine and connects to nobody."""
USERS_OF_SOCKETS = {
    "runtime/transport/tcp.py",  # all that processes of a job say to their peers
    "runtime/interrupts/open_sockets.py",  # those of libraries, looked at from outside
    "cli/launch.py",  # the stores of torch that a launch serves
    "cli/stores.py",
}


def socket_names(source):
    """Returns what a module takes from `socket`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "socket":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name == "socket"} - {None}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id == "socket" else set()
    return names


def test_peers_are_reached_by_the_transport_alone():
    package = ROOT / "megatron_moevement"
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if socket_names(path.read_text("utf-8")) - {HOST_NAME}
    }
    assert users == USERS_OF_SOCKETS


@pytest.mark.parametrize(
    "source",
    [
        "import socket\nsocket.socket()",
        "from socket import create_connection",
        "import socket as s\ns.socket()",
    ],
)
def test_a_use_of_sockets_is_found(source):
    assert socket_names(source) - {HOST_NAME} != set()
    assert socket_names("import socket\nsocket.gethostname()") == {HOST_NAME}
