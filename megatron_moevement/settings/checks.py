# SPDX-License-Identifier: Apache-2.0
"""Checks that do not depend on each other: what they refuse is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from megatron_moevement.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


class Checks:
    """Notes what is wrong, so that a user mends it all at once.

    A check that another one's failure would mislead or crash is left out by its caller.
    """

    def __init__(self) -> None:
        """Has found nothing yet."""
        self._refusals: list[str] = []

    def refuse(self, message: str) -> None:
        """Notes what is wrong, as in `UserError`."""
        self._refusals.append(message)

    def passes(self, check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Returns whether a check refuses nothing."""
        return self.result(lambda: (check(*args, **kwargs),)) is not None

    def result(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Returns what is made; None: it was refused."""
        try:
            return make(*args, **kwargs)
        except UserError as error:
            self._refusals += error.messages
            return None

    def end(self) -> None:
        """Refuses what was noted.

        Raises:
            UserError: with each of its messages, if there are any.
        """
        if self._refusals:
            raise UserError(*dict.fromkeys(self._refusals))
