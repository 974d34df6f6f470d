# SPDX-License-Identifier: Apache-2.0
"""The tiers of one generation: persisted windows are written to them beside training."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Protocol

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.tiers.tier import Manifest, TierName, is_due
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.coordination.agreement import (
    as_user_error,
    broadcast_json,
    together,
)
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.tiers.part import Author, Told, WindowSlots
from megatron_moevement.runtime.tiers.target import Target, open_target
from megatron_moevement.runtime.tiers.writer import Due, TierWriter
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.tiers.one_place import check_one_place

_WRITERS_BYTES = 8


class Written(Protocol):
    """What a window is written from: a process's memory."""

    @property
    def own_ring(self) -> RingFile:
        """The slots of its rank."""

    @property
    def journal(self) -> Journal:
        """What it knows."""


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Where persisted windows are written; the training thread of every rank calls it.

    Attributes:
        target: where they lie.
        interval: every so many persisted windows one is written.
        writers: stands for this generation of the job, the same on all ranks.
        author: this rank.
        writer: the thread that writes; None where nothing is trained.
    """

    target: Target
    interval: int
    writers: str
    author: Author
    writer: TierWriter | None

    def at_commit(self, memory: Written, former: Window | None) -> None:
        """Takes note of what a step has brought to be written; waits for nothing.

        Args:
            memory: its journal has the step.
            former: the window that was persisted before the step.
        """
        state = memory.journal.state
        if self.writer is None or state is None:
            return
        start = state.timetable.first_step
        if state.persisted is not None:
            start = state.persisted.last + 1
            if state.persisted != former:
                self._report_passed_over(self.writer, state, former)
                if self._is_due(state, state.persisted):
                    self.writer.offer(self._due(state, state.persisted, memory))
        window = state.timetable.window_of(start)
        if self._is_due(state, window):
            self.writer.captured(self._slots(state, window, memory))

    def _report_passed_over(
        self, writer: TierWriter, state: JournalState, former: Window | None
    ) -> None:
        """Reports windows that became persisted at once with a later one: their slots are going."""
        if former is None or state.persisted is None or not state.timetable.has(former):
            return
        window = state.timetable.window_of(former.last + 1)
        while window.start < state.persisted.start:
            if self._is_due(state, window):
                writer.passed_over(TierName.of(state.rollbacks, window, self.writers))
            window = state.timetable.window_of(window.last + 1)

    def _is_due(self, state: JournalState, window: Window) -> bool:
        return is_due(state.timetable, window, self.interval)

    def _due(self, state: JournalState, window: Window, memory: Written) -> Due:
        journal, slots = memory.journal, self._slots(state, window, memory)
        reached = slots.tier.committed
        entries = {step: journal.entry(step) for step in journal.entries() if step <= reached}
        told = Told(
            dataclasses.replace(state, committed=reached),
            *(entries, journal.schedules(), self.author),
        )
        return Due(slots, told, journal, time.monotonic())

    def _slots(self, state: JournalState, window: Window, memory: Written) -> WindowSlots:
        return WindowSlots(
            TierName.of(state.rollbacks, window, self.writers), window, memory.own_ring
        )


def open_tiers(
    settings: FaultTolerance,
    run_id: str,
    objects: LiveObjects,
    generation: Generation,
    events: Events,
) -> Tiers | None:
    """Returns where this generation writes its persisted windows; every rank calls it, in step.

    Args:
        run_id: of the run that they belong to.

    Returns:
        None where no flag asks for tiers.

    Raises:
        UserError: on all ranks: no library reads such a URL, or a launch whose ranks write to
            several places begins.
    """
    place = settings.moevement_tier_dir
    if place is None:
        return None
    with as_user_error():
        target = together(lambda: open_target(place, run_id), objects.device)
    writers = broadcast_json(secrets.token_hex(_WRITERS_BYTES), 0, objects.device)
    if generation.number == 0 and not settings.moevement_recover_only:
        check_one_place(target, writers, objects.host, objects.device)

    def written(manifest: Manifest, duration_s: float) -> None:
        events.emit(
            EventName.TIER_WRITTEN,
            manifest.name.committed,
            start=manifest.window.start,
            size=manifest.window.size,
            tier_bytes=manifest.size_bytes,
            duration_s=duration_s,
        )

    def begin() -> TierWriter:
        ranks, keep = objects.layout.ranks, settings.moevement_tier_keep
        return TierWriter(target, ranks, objects.rank, keep, written)

    writer = None if settings.moevement_recover_only else generation.own(begin)
    author = Author(objects.computation, objects.host, objects.identity.portable_fingerprint)
    return Tiers(target, settings.moevement_tier_interval, writers, author, writer)
