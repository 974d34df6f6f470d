# SPDX-License-Identifier: Apache-2.0
"""The table of features names tests that exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def features():
    """The module of the feature tests."""
    path = ROOT / "tests" / "training" / "test_features.py"
    spec = importlib.util.spec_from_file_location("features_of_the_document", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_in_the_table():
    """Returns the tests that the table names, and those of them in italics."""
    text = (ROOT / "docs" / "use" / "features.md").read_text()
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    cells = " ".join(rows)
    return set(re.findall(r"`([^`]+)`", cells)), set(re.findall(r"\*`([^`]+)`\*", cells))


def test_every_test_that_the_table_names_exists(features):
    names, _ = names_in_the_table()
    assert names
    assert not names - features.FEATURES.keys()


def test_the_table_tells_the_slow_tests_apart(features):
    names, slow = names_in_the_table()
    assert slow == names & features.SLOW_LAYOUTS.keys()
