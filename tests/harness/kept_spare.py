# SPDX-License-Identifier: Apache-2.0
"""A spare in this process, and what ranks tell it: for tests of what it keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.coordination.notice_board import Topic
from megatron_moevement.runtime.peers.ledger_messages import History
from megatron_moevement.runtime.slots.journal import JournalShape, JournalState
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.strategies.moevement.protection.reserve import Reserve
from megatron_moevement.strategies.moevement.spare_memory import SpareMemory
from tests.harness.one_schedule import one_schedule

ONE, OTHER = LogicalRank(), LogicalRank(dp=1)
IDENTITY = StoreIdentity("run-1", "0123abcd")
RING = RingShape.equal(capacity=5, buffer_bytes=200, max_parts=3)
JOURNAL = JournalShape(retained_steps=6, entry_bytes=100, last_step=50, schedule_bytes=16)
WINDOW = Window(3, 3)
STATE = JournalState(
    rollbacks=7, timetable=one_schedule(3), committed=6, persisted=WINDOW, rank=None
)
PROCESS, PROCESSES = 2, 3


class Board:
    """The notices of one generation, in this process."""

    def __init__(self) -> None:
        self.posted: dict[Topic, list[Any]] = {}

    def post(self, topic: Topic, document: Any) -> None:
        """Adds a notice."""
        self.posted.setdefault(topic, []).append(document)

    def read(self, topic: Topic) -> list[Any]:
        """Returns the notices of a topic."""
        return self.posted.get(topic, [])


def told(owner: LogicalRank = ONE, first: int = 4, **changes: Any) -> History:
    """Returns what a rank tells with its copies: its ledger from a step on."""
    state = dataclasses.replace(STATE, **changes)
    steps = range(first, state.committed + 1)
    entries = {step: b"entry %d" % step for step in steps}
    losses = {step: step / 8 for step in range(1, state.committed + 1)}
    schedules = dict.fromkeys(state.timetable.digests(), b"slots")
    return History(owner, IDENTITY, RING, JOURNAL, state, entries, losses, schedules)


def store_slots(memory: SpareMemory, owner: LogicalRank, *steps: int, rollbacks: int = 7) -> None:
    """Lets a spare keep slots of a rank, as if they had arrived."""
    for step in steps:
        payload = bytes([step]) * 100
        slot = (step - WINDOW.start) % WINDOW.size
        window = Window(step - slot, WINDOW.size)
        parts = (SlotPart.of("head", 0, memoryview(payload)),)
        record = SlotRecord(rollbacks, window, slot, step, 100, parts)
        ring = memory._slots.ring_for(owner)  # noqa: SLF001  (where arrivals go)
        assert ring is not None
        ring.reserve(step)[:100] = payload
        ring.publish(record)


def await_made(reserve: Reserve) -> None:
    """Waits until all is in reserve that there was room for."""
    if reserve.thread is not None:
        reserve.thread.join()
