# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: who has given no sign of life for too long, without any clock.

NVRx (0.4.1 to 0.7) writes the time of day into a sign of life, and who watches compares it with the
time of day of its own machine. Where a clock is set by more than the limit, or two machines differ
by so much, a monitor gives up all other processes. Here signs are numbered, and who watches counts
its looks in vain: a process that was stopped itself, and did not look, gives nobody up.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import defaultdict
from typing import Any

from nvidia_resiliency_ext.inprocess.sibling_monitor import SiblingMonitor

from megatron_moevement.runtime.rebindings import rebind

_WRITER_BYTES = 8
_QUIET_LOOKS = 2


class Heartbeats:
    """Numbers the signs that this process gives, and remembers those that it has seen."""

    def __init__(self) -> None:
        self._writer = secrets.token_hex(_WRITER_BYTES)
        self._numbers = itertools.count()
        self._newest: dict[tuple[int, str], int] = {}
        self._in_vain: defaultdict[int, int] = defaultdict(int)

    def give(self) -> list[str | int]:
        """Returns the next sign of life."""
        return [self._writer, next(self._numbers)]

    def look(self, rank: int, sign: list[Any] | None) -> int:
        """Takes the sign of a process that lies there now; one that was seen before is none.

        Args:
            sign: as `give` returned it; None where there is none.

        Returns:
            How many looks in a row have found nothing new, this one included.
        """
        self._in_vain[rank] += 1
        if sign is not None:
            writer, number = (rank, str(sign[0])), int(sign[1])
            if number > self._newest.get(writer, -1):
                self._newest[writer] = number
                self._in_vain[rank] = 0
        return self._in_vain[rank]


def check_heartbeats(monitor: SiblingMonitor) -> None:
    """Gives up who is silent for too long; stands in for `SiblingMonitor.check_heartbeats`.

    A process watches the next one. Where that one is quiet, it looks for all: who is lost together
    with it may have nobody left who watches.
    """
    store, sibling = monitor.store, monitor.sibling_rank
    in_vain = {sibling: store.get_heartbeat(sibling)}
    if in_vain[sibling] < _QUIET_LOOKS:
        return
    others = [rank for rank in range(monitor.world_size) if rank != sibling]
    in_vain |= dict(zip(others, store.get_heartbeats(others), strict=True))
    limit = math.ceil(monitor.timeout / monitor.interval)
    silent = {rank for rank, looks in in_vain.items() if looks >= limit}
    found = silent - monitor.seen_unresponsive_ranks
    if found:
        monitor.terminate_unresponsive_ranks(found)
        monitor.seen_unresponsive_ranks.update(found)


def mend_heartbeats() -> None:
    """Makes monitors that are started from now on look so."""
    rebind(f"{SiblingMonitor.__module__}:SiblingMonitor.check_heartbeats", check_heartbeats)
