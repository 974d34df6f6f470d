"""The slots of a rank whose process kept copies for it before: only its own ring counts."""

from types import SimpleNamespace

import pytest

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.facts.facts import Condition, Facts, Holding, LiveState, ProcessFacts
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.recovery.plan import Plan, SlotFetch, Verdict
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.identity import StoreIdentity
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.stores.store import RingRole, RingShape, StoreDirectory
from megatron_moevement.strategies.moevement.recovery.own_slots import OwnSlots

RANK, PROCESS, OTHER = LogicalRank(), 2, 0
WINDOW, TARGET = Window(0, 4), 3
SHAPE = RingShape(capacity=9, buffer_bytes=8, max_parts=1)


class Copies:
    """Gets slots out of the ring of copies, as from the own server; notes what is sent off."""

    def __init__(self, own, held):
        self._own, self._held = own, held
        self.landed = []

    def fetch(self, process, key):
        assert (process, key.owner) == (PROCESS, RANK)
        record = self._held.record(key.step)
        self._own.buffer(record.step)[:8] = self._held.payload(record)
        self._own.publish(record)

    def land_for(self, record, lacking):
        self.landed.append((record.step, lacking))


@pytest.fixture
def slots_of(shared_memory):
    """Returns a function that gives the slots of a rank of which its process kept some steps'."""
    with StoreDirectory(shared_memory, StoreIdentity("run", "0123"), PROCESS) as store:
        own = store.ring(RingRole.OWN, RANK, SHAPE)
        held = store.ring(RingRole.HELD, RANK, SHAPE)

        def slots(kept):
            for step in kept:
                payload = held.buffer(step)[:8]
                payload[:] = bytes([step]) * 8
                part = SlotPart.of("head", 0, payload)
                held.publish(SlotRecord(0, WINDOW, step, step, 8, (part,)))
            holding = Holding(RANK, WINDOW, sum(1 << step for step in kept))
            process = ProcessFacts(
                PROCESS, "a", RANK, TARGET, LiveState(Condition.ABSENT), holdings=(holding,)
            )
            facts = Facts(1, Layout(), Ends.INDEPENDENT, 0, (process,))
            plan = Plan(1, Verdict.GLOBAL, "", TARGET)
            memory = SimpleNamespace(
                plan=SimpleNamespace(placement=SimpleNamespace(holders={RANK: (OTHER,)})),
                host=SimpleNamespace(process=PROCESS),
                own_ring=own,
                copies=Copies(own, held),
            )
            return OwnSlots(memory, facts, RANK, plan), memory

        yield slots


def from_own(steps):
    """Returns what a plan has for a rank whose process kept its slots."""
    return [SlotFetch(RANK, SlotKey(RANK, WINDOW, step), (PROCESS,)) for step in steps]


@pytest.mark.parametrize("start", [0, 2, TARGET])
def test_a_slot_that_was_only_kept_for_the_rank_is_captured_again(slots_of, start):
    """Else nobody sends it, the window is never complete, and all wait once the ring is full."""
    slots, memory = slots_of(range(TARGET + 1))
    slots.fetch(from_own(range(start)))
    ring = slots.ring(start)
    assert ring == SlotRing(SHAPE.capacity, 0, start)
    assert [record.step for record in memory.own_ring.records()] == list(ring.steps)
    slots.share(slots.shareable(), start)
    assert memory.copies.landed == [(step, [OTHER]) for step in ring.steps]


def test_a_slot_that_the_own_ring_has_is_not_captured_again(slots_of):
    slots, memory = slots_of(range(TARGET + 1))
    slots.fetch(from_own(range(TARGET)))
    memory.copies.fetch(PROCESS, SlotKey(RANK, WINDOW, TARGET))
    assert slots.ring(TARGET) == SlotRing(SHAPE.capacity, 0, TARGET + 1)
