# SPDX-License-Identifier: Apache-2.0
"""The elected reader: one of many processes reads what grows with all, the others read its result.

If each process read that finds that it is time to, their reading would delay the first, and let
more join.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

READING_S = 5.0
"""After that another process reads in the place of one that has no result."""


class ElectedReader:
    """Whether a process is the one that reads, or has to read in the place of another one.

    Attributes:
        own: what the process proposes in an election; no other one proposes the same.
        until_s: when another one reads, by the monotonic clock; infinite before the first election.
    """

    def __init__(self, own: Any, patience_s: float = READING_S) -> None:
        """Takes part in no election yet.

        Args:
            patience_s: how long a reader may take.
        """
        self.own = own
        self.until_s = math.inf
        self._patience_s = patience_s
        self._stand_ins = 0

    def reads(
        self,
        elected: Callable[[int], Any],
        is_gone: Callable[[Any], bool] = lambda reader: False,
    ) -> bool:
        """Returns whether this process reads now; asked again as long as there is no result.

        Args:
            elected: proposes this process in the election of a number, and returns what the first
                one has proposed, None where that can't be found.
            is_gone: returns whether a reader can't have a result any more.
        """
        while True:
            reader, now_s = elected(self._stand_ins), time.monotonic()
            if reader == self.own:
                return True
            self.until_s = min(self.until_s, now_s + self._patience_s)
            if now_s < self.until_s and (reader is None or not is_gone(reader)):
                return False
            self._stand_ins, self.until_s = self._stand_ins + 1, math.inf
