# SPDX-License-Identifier: Apache-2.0
"""`docs/operate/losses.md` names a test for every row, and the tests are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "operate" / "losses.md").read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| fault |")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test_that_is_there(row):
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 6
    if cells[-1] == "the same":
        return
    file, name = re.fullmatch(r"`([\w/.]+)::(\w+)`", cells[-1]).groups()
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")


def test_there_are_rows():
    assert len(ROWS) > 15
