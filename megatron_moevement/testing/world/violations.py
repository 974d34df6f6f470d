# SPDX-License-Identifier: Apache-2.0
"""Violations: how a check of a simulated world says that something does not hold."""

from __future__ import annotations


class ViolationError(AssertionError):
    """An invariant does not hold.

    Attributes:
        invariant: its name.
    """

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


def require(holds: bool, invariant: str, *what: object) -> None:
    """Raises `ViolationError` unless something holds; what is wrong is put together only then."""
    if not holds:
        raise ViolationError(invariant, " ".join(map(str, what)))
