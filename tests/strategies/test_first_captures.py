# SPDX-License-Identifier: Apache-2.0
"""What a replay is compared with: the slots that ranks have, and those that spares keep."""

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Origin, Plan, Schedules, StageReplay, Verdict
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.strategies.moevement.protection.first_captures import (
    first_captures,
    own_captures,
    record_digest,
)
from tests.harness.one_schedule import one_schedule

LOST, BYSTANDER = LogicalRank(pp=1), LogicalRank()
SHAPE = RingShape.equal(capacity=9, buffer_bytes=8, max_parts=1)
PLAN = Plan(
    1,
    Verdict.LOCALIZED,
    "",
    target=6,
    window=Window(2, 3),
    replays=(StageReplay(1, 2, Origin.WINDOW),),
    rollbacks=7,
    schedules=Schedules(one_schedule(3, first_step=2)),
)


def capture(store, owner, steps, rollbacks=7):
    ring, digests = store.ring(RingRole.HELD, owner, SHAPE), {}
    for step in steps:
        payload = ring.reserve(step)[:8]
        payload[:] = bytes([step]) * 8
        window = Window(2 + (step - 2) // 3 * 3, 3)
        part = SlotPart.of("head", 0, payload)
        record = SlotRecord(rollbacks, window, step - window.start, step, 8, (part,))
        ring.publish(record)
        digests[step] = record_digest(record)
    return digests


def test_slots_that_only_a_spare_has_are_compared_with(shared_memory):
    with StoreDirectory(shared_memory, StoreIdentity("run", "0123"), 0) as store:
        own = capture(store, LOST, range(2, 5))
        capture(store, BYSTANDER, range(2, 7))
        spare = {str(LOST): {"4": "other", "6": "sixth", "7": "beyond"}, str(BYSTANDER): {"4": "x"}}
        told = [own_captures(store, PLAN), spare]
    assert told[0] == {str(LOST): {3: own[3], 4: own[4]}}
    assert first_captures(LOST, PLAN, told) == {3: {own[3]}, 4: {own[4], "other"}, 6: {"sixth"}}
    assert first_captures(BYSTANDER, PLAN, told) == {}
