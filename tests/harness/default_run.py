# SPDX-License-Identifier: Apache-2.0
"""What runs by default: a part of the cases of a test, the others with `-m slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[object], names: Iterable[object]) -> list[Any]:
    """Returns the names as parameters of a test, all but the kept ones marked slow.

    Raises:
        AssertionError: one that is to be kept is none of the names.
    """
    listed = list(names)
    assert set(kept) <= set(listed), f"no such case: {set(kept) - set(listed)}"
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in listed]
