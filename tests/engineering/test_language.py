"""The documentation is written in plain technical English."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_STEPS = "barrier|commit|step|window|pass|start|target"
PATTERNS = {
    "a process does it: name it": r"(?:^|[.:;|] )Who \w+",
    "after": rf"\bbehind (?:a|the|its|that) (?:\w+ )?(?:{OF_STEPS})",
    "before": rf"\bin front of (?:a|the|its|that) (?:\w+ )?(?:{OF_STEPS})",
    "again, or a new one": r"\banew\b",
    "no process, no rank": r"\b(?:[Nn]obody|[Ss]omebody)\b",
    "publish, report, print": r"\b(?:told|tells?|says?)\b",
    "has, depends on": r"\bknows?\b",
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_subject_verb_and_object(page):
    assert found_in(page.read_text()) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Who fails says why.",
        "It waits behind the commit barrier.",
        "It stands in front of its commit.",
        "Windows begin anew.",
        "Nobody waits.",
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

