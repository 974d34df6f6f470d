# SPDX-License-Identifier: Apache-2.0
"""The documentation, and what the program prints, is written in plain technical English."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGE = ROOT / "megatron_moevement"
MODULES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "testing" not in path.parents
]
OF_STEPS = "barrier|commit|step|window|pass|start|target"
PATTERNS = {
    "a process does it: name it": r"(?:^|[.:;|] )Who \w+",
    "after": rf"\bbehind (?:a|the|its|that) (?:\w+ )?(?:{OF_STEPS})",
    "before": rf"\bin front of (?:a|the|its|that) (?:\w+ )?(?:{OF_STEPS})",
    "again, or a new one": r"\banew\b",
    "no process, no rank": r"\b(?:[Nn]o|[Ss]ome|[Aa]ny|[Ee]very)body\b|\b[Ww]hoever\b",
    "publish, report, print": r"\b(?:told|tells?|says?)\b",
    "has, depends on": r"\bknows?\b",
    "find out, measure": r"\b(?:learns?|learnt)\b",
    "test evidence": r"What was seen",
}


def found_in(text):
    """Returns what is better written otherwise, outside of code and of names of files and tests."""
    plain = re.sub(r"^(?: {4}.*|```[^`]*```)$|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.MULTILINE)
    return [
        f"{line.strip()!r}: {instead}"
        for line in plain.splitlines()
        for instead, pattern in PATTERNS.items()
        if re.search(pattern, line)
    ]


def printed_by(source):
    """Returns the texts of a module that it may print: all with a space but docstrings."""
    tree = ast.parse(source)
    stands_alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " in node.value
        and id(node) not in stands_alone
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_subject_verb_and_object(page):
    assert found_in(page.read_text()) == []


def test_what_the_program_prints_has_subject_verb_and_object():
    texts = {path: "\n".join(printed_by(path.read_text(encoding="utf-8"))) for path in MODULES}
    assert {str(path): found for path, text in texts.items() if (found := found_in(text))} == {}


def test_only_what_is_printed_is_judged():
    source = '"""A rank knows."""\nraise ValueError(f"{1} knows it", "knows")\n'
    assert printed_by(source) == [" knows it"]


@pytest.mark.parametrize(
    "sentence",
    [
        "Who fails says why.",
        "It waits behind the commit barrier.",
        "It stands in front of its commit.",
        "Windows begin anew.",
        "Nobody waits.",
        "Everybody waits.",
        "It learns the step.",
        "Each process tells what it has.",
        "It is told so.",
        "a strategy that the loop knows",
        "## What was seen",
    ],
)
def test_a_sentence_of_the_dialect_is_found(sentence):
    assert found_in(sentence)


def test_code_is_left_alone():
    assert found_in("`test_nobody_waits` in [recovery.md](nobody.md)\n\n    nobody knows\n") == []
