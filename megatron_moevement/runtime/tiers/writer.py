# SPDX-License-Identifier: Apache-2.0
"""The writer of tiers: a thread that training never waits for."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

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
from megatron_moevement.runtime.priority import lower_priority
from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.runtime.tiers.manifests import (
    begun_tiers,
    parts_there,
    remove_tier,
    whole_tiers,
    write_manifest,
)
from megatron_moevement.runtime.tiers.part import LostSlotError, Told, WindowSlots, write_part
from megatron_moevement.runtime.tiers.target import FLAG, Target

logger = logging.getLogger(__name__)

_FIRST_LOOK_S = 0.05
_LONGEST_LOOK_S = 2.0
"""Between looks whether the parts of other ranks are there: ever longer, as others need longer."""
_IDLE = timedelta(hours=1)
_LOSSES = 1 << 16
_NONE = TierName(-1, -1, "")
_PATIENCE_S = 1.0
"""A call of the target that takes longer ends by itself, after its generation."""

F = TypeVar("F")


class _ClosedError(MoEvementError):
    """The writer is closed."""


@dataclasses.dataclass(frozen=True)
class Due:
    """A persisted window to be written.

    Attributes:
        began_s: when it was persisted, on the clock of `time.monotonic`.
        journal: has the losses.
    """

    slots: WindowSlots
    told: Told
    journal: Journal
    began_s: float

    @property
    def name(self) -> TierName:
        """Of its tier."""
        return self.slots.tier

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
        self._captured: WindowSlots | None = None
        self._dues: Mapping[TierName, Due] = {}
        self._taken = _NONE
        self._former = _NONE
        self._awaited: list[Due] = []
        self._look_s = _FIRST_LOOK_S
        self._next_look_s = 0.0
        self._failures = 0
        self._is_closed = False
        self._news = InterruptSafeEvent()
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)
        self._thread.start()

    def captured(self, slots: WindowSlots) -> None:
        """Takes note that a window has another slot, so that it is written; returns at once."""
        self._captured = slots
        self._news.tell()

    def offer(self, due: Due) -> None:
        """Takes note that a window is persisted; returns at once.

        One that an earlier one has kept waiting until then is given up: its slots go.
        """
        taken = self._taken
        for late in [name for name in self._dues if name > taken]:
            self._failed(late, f"that of step {taken.committed} is still being written")
        writing = {name: former for name, former in self._dues.items() if name == taken}
        self._dues = {**writing, due.name: due}
        self._news.tell()

    def passed_over(self, name: TierName) -> None:
        """Takes note that a later window was persisted at once with one that was to be written."""
        self._failed(name, "a later window was persisted with it")

    def close(self) -> None:
        """Ends the thread; what is being written is given up, and never counts."""
        self._is_closed = True
        self._news.tell()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        lower_priority(for_slots=False)
        try:
            while True:
                slots = self._await(self._next)
                self._taken = slots.tier
                try:
                    self._write(slots)
                except Exception as error:  # noqa: BLE001  (libraries of fsspec raise what they like)
                    self._proceed()
                    self._failed(slots.tier, f"{type(error).__name__}: {error}")
        except _ClosedError:
            return

    def _next(self) -> WindowSlots | None:
        """Returns the window to write next: the older of those that were noted."""
        captured = self._captured  # first: a later one may be noted after a due one was looked for
        for slots in (*(due.slots for due in self._dues.values()), captured):
            if slots is not None and slots.tier > self._taken:
                return slots
        return None

    def _await(self, find: Callable[[], F | None]) -> F:
        """Returns what is found, as soon as it is; looks after former tiers until then.

        Raises:
            _ClosedError: the generation is over.
        """
        while True:
            self._proceed()
            if self._is_first:
                self._look_after_others()
            found = find()
            if found is not None:
                return found
            self._news.wait(self._next_look())

    def _look_after_others(self) -> None:
        """Looks whether other ranks have written their parts, when it is time to."""
        dues = self._dues
        due = dues[max(dues)] if dues else None
        is_new = due is not None and due.name > self._former
        if not is_new and (not self._awaited or time.monotonic() < self._next_look_s):
            return
        try:
            if due is not None and is_new:
                self._begin(due)
            else:
                self._declare()
        except Exception as error:  # noqa: BLE001  (as above)
            self._proceed()
            self._failed(self._former, f"{type(error).__name__}: {error}")
        self._next_look_s = time.monotonic() + self._look_s
        self._look_s = min(2 * self._look_s, _LONGEST_LOOK_S)

    def _next_look(self) -> timedelta:
        """Returns how long to wait for news before a look at the target."""
        if not self._awaited:
            return _IDLE
        return timedelta(seconds=max(0.0, self._next_look_s - time.monotonic()))

    def _write(self, slots: WindowSlots) -> None:
        """Writes the slots of a window as they come, and the rest once it is persisted."""
        name, persisted = slots.tier, []

        def await_slot(step: int) -> None:
            self._await(lambda: slots.record(step) or self._due_from(name))

        def await_persisted() -> tuple[Told, Iterable[bytes]]:
            due = self._await(lambda: self._due_from(name))
            if due.name != name:
                raise LostSlotError("the window after it is persisted already")
            persisted.append(due)
            return due.told, due.losses()

        try:
            write_part(
                *(self._target, slots),
                await_slot=await_slot,
                await_persisted=await_persisted,
                proceed=self._proceed,
            )
        except LostSlotError as error:
            self._failed(name, f"{error}")
        except ValueError:
            self._proceed()
            raise
        else:
            self._wrote(persisted)

    def _due_from(self, name: TierName) -> Due | None:
        """Returns a window once it is persisted, or a later one is; None before."""
        dues = self._dues
        later = max((other for other in dues if other > name), default=name)
        return dues.get(name) or dues.get(later)

    def _wrote(self, written: list[Due]) -> None:
        if self._is_first:
            self._awaited += written
            self._look_s, self._next_look_s = _FIRST_LOOK_S, 0.0
        else:
            self._failures = 0

    def _begin(self, due: Due) -> None:
        """Makes room, and waits no longer for a tier whose slots are gone by now on all ranks."""
        former, self._former = self._former, due.name
        self._declare()
        for old in [each for each in self._awaited if each.name < former]:
            there = {part.rank for part in parts_there(self._target, old.name)}
            lacking = [str(rank) for rank in self._ranks if rank not in there]
            if not lacking:
                continue
            self._awaited.remove(old)
            self._failed(old.name, f"{len(lacking)} parts are lacking, as that of {lacking[0]}")
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
        manifest = Manifest(due.name, due.slots.window, parts)
        write_manifest(self._target, manifest)
        self._written(manifest, time.monotonic() - due.began_s)

    def _remove_old(self, now: Due) -> None:
        """Removes what is of no use; what other ranks may be writing stays."""
        awaited = [self._taken, *(each.name for each in self._awaited)]
        whole, begun = whole_tiers(self._target), begun_tiers(self._target)
        for name in of_no_use(whole, begun, awaited, now.name, self._keep):
            self._proceed()  # what was listed may be old by now, and a newer writer's be there
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
