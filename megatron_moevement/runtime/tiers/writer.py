# SPDX-License-Identifier: Apache-2.0
"""The writer of tiers: a thread that training never waits for, at the lowest priority."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.tiers.tier import (
    Manifest,
    PartName,
    TierName,
    is_reported,
    of_no_use,
    parts_of_all,
)
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.interrupts.interrupt_safe_event import InterruptSafeEvent
from megatron_moevement.runtime.priority import IDLE_NICE, lower_priority
from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.tiers.manifests import (
    begun_tiers,
    parts_there,
    remove_tier,
    whole_tiers,
    write_manifest,
)
from megatron_moevement.runtime.tiers.part import LostSlotError, Told, write_part
from megatron_moevement.runtime.tiers.target import FLAG, Target

logger = logging.getLogger(__name__)

_FIRST_LOOK = timedelta(seconds=0.05)
_LONGEST_LOOK = timedelta(seconds=2)
"""Between looks whether the parts of other ranks are there: ever longer, as others need longer."""
_IDLE = timedelta(hours=1)
_LOSSES = 1 << 16
_NONE = TierName(-1, -1, "")
_PATIENCE_S = 1.0
"""A call of the target that takes longer ends by itself, after its generation."""


class _ClosedError(MoEvementError):
    """The writer is closed."""


@dataclasses.dataclass(frozen=True)
class Due:
    """A persisted window to be written.

    Attributes:
        began_s: when it was persisted, on the clock of `time.monotonic`.
        journal: has the losses.
    """

    name: TierName
    told: Told
    ring: RingFile
    journal: Journal
    began_s: float

    def losses(self) -> Iterator[bytes]:
        """Yields those of the steps up to the state's, so many at a time."""
        steps = range(self.told.state.committed + 1)
        for first in range(0, len(steps), _LOSSES):
            yield self.journal.loss_bytes(steps[first : first + _LOSSES])


class TierWriter(Closing):
    """Writes this rank's parts of tiers; that of the first rank declares tiers whole."""

    def __init__(
        self,
        target: Target,
        ranks: Sequence[LogicalRank],
        own: LogicalRank,
        keep: int,
        written: Callable[[Manifest, float], None],
    ) -> None:
        """Starts the thread.

        Args:
            ranks: all of the job.
            own: that this process occupies.
            keep: how many whole tiers stay.
            written: is told of each whole tier, and how long that took in seconds, by the thread of
                the first rank.
        """
        self._target = target
        self._ranks = ranks
        self._is_first = own == ranks[0]
        self._keep = keep
        self._written = written
        self._due: Due | None = None
        self._awaited: list[Due] = []
        self._former = _NONE
        self._look = _FIRST_LOOK
        self._failures = 0
        self._is_closed = False
        self._news = InterruptSafeEvent()
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)
        self._thread.start()

    def offer(self, due: Due) -> None:
        """Takes a window to be written, unless an earlier one still is; returns at once."""
        earlier = self._due
        if earlier is None:
            self._due = due
            self._news.tell()
        else:
            self._failed(due.name, f"that of step {earlier.name.committed} is still being written")

    def close(self) -> None:
        """Ends the thread; what is being written is given up, and never counts."""
        self._is_closed = True
        self._news.tell()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        lower_priority(IDLE_NICE)
        while not self._is_closed:
            self._news.wait(self._next_look())
            due = self._due
            try:
                if due is not None:
                    self._write(due)
                else:
                    self._declare()
            except _ClosedError:
                return
            except Exception as error:  # noqa: BLE001  (libraries of fsspec raise what they like)
                name = self._former if due is None else due.name
                self._failed(name, f"{type(error).__name__}: {error}")
            if due is not None:
                self._due = None
                self._news.tell()

    def _next_look(self) -> timedelta:
        """Returns how long to wait for news before a look at the target."""
        if not self._awaited:
            return _IDLE
        look, self._look = self._look, min(2 * self._look, _LONGEST_LOOK)
        return look

    def _write(self, due: Due) -> None:
        if self._is_first:
            self._begin(due)
        try:
            write_part(
                *(self._target, due.name, due.ring, due.told),
                losses=due.losses(),
                proceed=self._proceed,
            )
        except LostSlotError as error:
            self._failed(due.name, f"{error}")
        except ValueError:
            if not self._is_closed:
                raise
        else:
            if self._is_first:
                self._look = _FIRST_LOOK
                self._awaited.append(due)
            else:
                self._failures = 0

    def _begin(self, due: Due) -> None:
        """Makes room, and waits no longer for a tier whose slots are gone by now on all ranks."""
        self._declare()
        for old in [each for each in self._awaited if each.name < self._former]:
            there = {part.rank for part in parts_there(self._target, old.name)}
            lacking = [str(rank) for rank in self._ranks if rank not in there]
            if not lacking:
                continue
            self._awaited.remove(old)
            self._failed(old.name, f"{len(lacking)} parts are lacking, as that of {lacking[0]}")
        self._former = due.name
        self._remove_old(due)

    def _proceed(self) -> None:
        if self._is_closed:
            raise _ClosedError("the generation is over")

    def _declare(self) -> None:
        """Declares the newest tier whole of which all parts are there; older ones wait no more."""
        for due in reversed(self._awaited):
            parts = parts_of_all(parts_there(self._target, due.name), self._ranks)
            if parts is not None:
                self._publish(due, parts)
                self._awaited = [each for each in self._awaited if each.name > due.name]
                self._failures = 0
                self._remove_old(due)
                return

    def _publish(self, due: Due, parts: tuple[PartName, ...]) -> None:
        window = due.told.state.persisted
        assert window is not None
        identity = due.ring.identity
        manifest = Manifest(due.name, window, identity.run_id, identity.fingerprint, parts)
        write_manifest(self._target, manifest)
        self._written(manifest, time.monotonic() - due.began_s)

    def _remove_old(self, now: Due) -> None:
        """Removes what is of no use; what other ranks may be writing stays."""
        awaited = [each.name for each in self._awaited]
        whole, begun = whole_tiers(self._target), begun_tiers(self._target)
        for name in of_no_use(whole, begun, awaited, now.name, self._keep):
            remove_tier(self._target, name)

    def _failed(self, name: TierName, why: str) -> None:
        """Reports one of some failures in a row; the next window is tried."""
        self._failures += 1
        if is_reported(self._failures):
            logger.warning(
                "no tier of step %d in %s: %s; training goes on, and a later window is written "
                "(%d in a row; %s, --moevement-tier-interval)",
                name.committed,
                self._target.place,
                why,
                self._failures,
                FLAG,
            )
