# SPDX-License-Identifier: Apache-2.0
"""The notice board of a generation: what processes tell each other outside of its groups.

Spares are in no group. What they tell ranks, and ranks tell them, is posted here.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol


class Topic(Enum):
    """What a notice is about."""

    SPARE = "spare"
    """A process that waits for a place keeps copies: where it is, and what it holds."""

    HELD = "held"
    """The facts of such a process, once it has read what it holds."""

    LEDGER = "ledger"
    """What such a process knows of committed steps, for where no rank does."""

    CAPTURES = "captures"
    """The digests of the slots that such a process has, for replays to be compared with."""

    LEFT = "left"
    """Ranks lack slots: such processes are to look for what was left on their machines."""

    FOUND = "found"
    """That such a process has done so, with the facts of what it holds then."""

    RESERVE = "reserve"
    """How much memory a rank takes at most, for such a process to make it while it waits."""

    WANTED = "wanted"
    """For each such process the ranks of which it is to keep copies."""

    OVER = "over"
    """A rank has finished: nobody will go on from what is in memory."""


class NoticeBoard(Protocol):
    """The board of one generation, as one process sees it."""

    def post(self, topic: Topic, document: Any) -> None:
        """Adds a notice for all processes to read; JSON."""

    def read(self, topic: Topic) -> list[Any]:
        """Returns the notices of a topic, the oldest first."""
