# SPDX-License-Identifier: Apache-2.0
"""What is replaced at run time is what the replacements were written for."""

import ast
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megatron_moevement
from megatron_moevement.runtime import rebindings
from megatron_moevement.runtime.rebindings import (
    REBINDINGS,
    ChangedUpstreamError,
    Rebinding,
    rebind,
)

PACKAGE = Path(megatron_moevement.__file__).parent
VARIABLES = [
    "integrations/megatron/transients.py: tensor_parallel_random.IS_CHECKPOINTING",
]
"""Upstream has these to be set."""
PLACE = "tests_upstream:a"
UPSTREAM = re.compile(r"(torch|nvidia_resiliency_ext|megatron|threading)(\.|$)")

LIST = """
import importlib, inspect, json
from functools import reduce
from megatron_moevement.runtime.rebindings import CLASS, REBINDINGS, parameters_of

found = {}
for place, each in REBINDINGS.items():
    one = reduce(getattr, each.name.split("."), importlib.import_module(each.module))
    found[place] = CLASS if inspect.isclass(one) else parameters_of(one)
print(json.dumps(found))
"""


def test_upstream_is_what_the_table_expects():
    """In a process of its own: others of this one may have replaced something."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIST], check=True, capture_output=True, text=True
    )
    expected = {place: list(each.expects) for place, each in REBINDINGS.items()}
    assert json.loads(done.stdout) == expected


@pytest.fixture
def module(monkeypatch):
    """Returns a module of which a function is in the table."""
    found = types.ModuleType("tests_upstream")
    found.a = lambda x, y: (x, y)
    monkeypatch.setitem(sys.modules, "tests_upstream", found)
    monkeypatch.setattr(rebindings, "_installed", {})
    entry = Rebinding("tests_upstream", "a", ("x, y",), "")
    monkeypatch.setitem(REBINDINGS, PLACE, entry)
    return found


def test_what_is_known_is_replaced_again_and_again(module):
    for number in range(3):
        rebind(PLACE, lambda *_, number=number: number)
        assert module.a() == number


def test_a_changed_function_is_refused_and_stays(module):
    changed = module.a = lambda x, z: (x, z)
    with pytest.raises(ChangedUpstreamError, match=r"a takes \(x, z\), not \(x, y\)"):
        rebind(PLACE, print)
    assert module.a is changed


def test_a_function_that_is_gone_is_refused(module):
    del module.a
    with pytest.raises(ChangedUpstreamError):
        rebind(PLACE, print)


def test_nothing_else_is_replaced():
    """No module assigns to an attribute of what it has imported from upstream."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        foreign = {
            (one.asname or one.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for one in node.names
            if UPSTREAM.match(getattr(node, "module", None) or one.name)
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                is_attribute = isinstance(target, ast.Attribute) and isinstance(root, ast.Name)
                if is_attribute and root.id in foreign:
                    found.append(f"{path.relative_to(PACKAGE)}: {ast.unparse(target)}")
    assert sorted(found) == sorted(VARIABLES)
