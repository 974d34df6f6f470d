# SPDX-License-Identifier: Apache-2.0
"""Peer trouble: what becomes of a holder of copies after a transfer to it has failed.

It is tried again after a pause that doubles with each failure in a row. Where failures go on,
another process takes its place; where nobody can, it is tried for as long as the generation lasts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import Enum

from megatron_moevement.policy.copies.placement import Host, Placement, replace_holder
from megatron_moevement.policy.job.ranks import LogicalRank

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_LASTING_FAILURES = 4
"""In a row: about two seconds of connections that break at once."""
_LASTING_S = 30.0
"""Of failures in a row, since something moved last: a transfer that gets no answer is enough."""
_FORGOTTEN_AFTER_S = 60.0


class Remedy(Enum):
    """What is done about a peer to which a transfer has failed."""

    WAIT = "wait until its pause is over"
    TRY_AGAIN = "connect again, and send everything that it has not confirmed"


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Failed transfers to one peer, none of which a confirmed copy has followed.

    Attributes:
        since_s: when something moved last before the first of them failed.
        last_s: when the last of them failed.
        reason: of the last one.
    """

    failures: int
    since_s: float
    last_s: float
    reason: str

    @classmethod
    def after(cls, former: Trouble | None, since_s: float, failed_s: float, reason: str) -> Trouble:
        """Returns the trouble with a peer after another transfer to it has failed."""
        if former is None:
            return cls(1, since_s, failed_s, reason)
        return cls(former.failures + 1, former.since_s, failed_s, reason)

    @property
    def pause_s(self) -> float:
        """Seconds from the last failure until the peer is tried again."""
        doubled = min(self.failures - 1, 10)
        return min(math.ldexp(_FIRST_PAUSE_S, doubled), _LONGEST_PAUSE_S)

    @property
    def is_lasting(self) -> bool:
        """Whether another process is to take the peer's place, where one can."""
        return self.failures >= _LASTING_FAILURES or self.last_s - self.since_s >= _LASTING_S

    def remedy(self, now_s: float) -> Remedy:
        """Returns what is done about a peer whose place nobody takes."""
        return Remedy.TRY_AGAIN if now_s - self.last_s >= self.pause_s else Remedy.WAIT

    def is_forgotten(self, now_s: float) -> bool:
        """Returns whether a peer that keeps no copies now may keep some again."""
        return now_s - self.last_s >= _FORGOTTEN_AFTER_S


def successor_of(
    placement: Placement,
    hosts: Iterable[Host],
    rank: LogicalRank,
    silent: int,
    *,
    troubles: Mapping[int, Trouble],
    now_s: float,
) -> tuple[int | None, Placement]:
    """Returns who keeps the copies of a rank from now on instead of a holder, and the placement.

    Args:
        placement: in force; it stays where nobody takes over.
        hosts: the live processes.
        rank: whose copies are meant.
        silent: the holder whose trouble is lasting.
        troubles: of the rank with other processes. Who keeps no copies now gets none before its
            trouble is forgotten.
        now_s: the time.
    """
    former = placement.holders[rank]
    able = [
        host
        for host in hosts
        if (trouble := troubles.get(host.process)) is None
        or trouble.is_forgotten(now_s)
        or host.process in former
    ]
    after = replace_holder(placement, able, rank, silent)
    successor = next((each for each in after.holders[rank] if each not in former), None)
    return successor, placement if successor is None else after
