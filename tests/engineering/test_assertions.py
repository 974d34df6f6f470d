# SPDX-License-Identifier: Apache-2.0
"""Optimized bytecode has no assertions: what guards the protocol is no assertion."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_moevement"
PARTS = ("integrations", "policy", "runtime", "strategies", "training")
OPTIMIZED = f"""
from importlib.machinery import SourceFileLoader

as_it_is = SourceFileLoader.get_code

def get_code(loader, name):
    path = loader.get_filename(name)
    if not path.startswith({str(PACKAGE)!r}):
        return as_it_is(loader, name)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True, optimize=1)

SourceFileLoader.get_code = get_code
"""
"""Takes assertions out of this package; of all others there is bytecode with them already."""
BROKEN = """
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.strategies.moevement.capture.window_capture import WindowCapture
capture = object.__new__(WindowCapture)
capture._ring = SlotRing(3, 1)
capture.begin(1, None)
"""
"""Captures S_1 where S_0 was not."""


def narrows_a_type(node):
    """Returns whether an assertion only says of what type something is."""
    test = node.test
    if isinstance(test, ast.Compare):
        (operator,), (right,) = test.ops[:1], test.comparators[:1]
        return isinstance(operator, ast.IsNot) and getattr(right, "value", 0) is None
    return isinstance(test, ast.Call) and getattr(test.func, "id", None) == "isinstance"


@pytest.mark.parametrize("part", PARTS)
def test_assertions_only_narrow_types(part):
    guards = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((PACKAGE / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and not narrows_a_type(node)
    ]
    assert guards == []


def test_a_broken_protocol_is_seen_without_assertions():
    done = subprocess.run(
        [sys.executable, "-c", OPTIMIZED + BROKEN], capture_output=True, text=True, check=False
    )
    assert "DisagreementError: S_1 after" in done.stderr
