# SPDX-License-Identifier: Apache-2.0
"""docs/understand/invariants.md names tests that exist, and something for every invariant."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "understand" / "invariants.md").read_text(encoding="utf-8")
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_test_that_is_named_exists():
    assert TESTS
    missing = []
    for path, name in TESTS:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{path}::{name}")
    assert not missing


def test_every_invariant_is_checked_by_something():
    rows = re.findall(r"^\| (\d\w?) \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert [number for number, _ in rows] == ["1", "2", "2b", *"3456789"]
    for number, checks in rows:
        assert "tests/" in checks or "simulator: `" in checks, number
