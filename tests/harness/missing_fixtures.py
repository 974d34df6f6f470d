# SPDX-License-Identifier: Apache-2.0
"""Tests that ask for fixtures that do not exist: found when they are collected, run or not.

Pytest finds that out when it sets a test up, in a campaign after an hour.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def missing_fixtures(item: pytest.Item) -> list[str]:
    """Returns the names that a test, or a fixture of it, asks for and that are no fixture here."""
    if not isinstance(item, pytest.Function):
        return []
    there = item._fixtureinfo.name2fixturedefs.keys() | {"request"}  # noqa: SLF001  (no public name)
    given = item.callspec.params.keys() if hasattr(item, "callspec") else set()
    return [name for name in item.fixturenames if name not in there | given]


def refuse_missing_fixtures(items: Iterable[pytest.Item]) -> None:
    """Ends a run of tests before the first one.

    Raises:
        UsageError: a test asks for a fixture that does not exist.
    """
    lacking = {item.nodeid: names for item in items if (names := missing_fixtures(item))}
    if lacking:
        raise pytest.UsageError(
            "; ".join(f"{test}: no fixture {', '.join(names)}" for test, names in lacking.items())
        )
