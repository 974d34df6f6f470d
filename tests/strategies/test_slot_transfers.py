# SPDX-License-Identifier: Apache-2.0
"""Slots on their way into the ring of a rank, wherever its process has them, and to holders."""

from types import SimpleNamespace

import pytest

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Origin, RankPlan, SlotFetch, SlotSend
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.sender import FetchError
from megatron_moevement.runtime.slots.mapped_file import PAGE_BYTES
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.strategies.moevement.recovery.slot_transfers import fetch_slots, send_slots

RANK, PROCESS, OTHER, SILENT = LogicalRank(), 2, 0, 1
WINDOW = Window(0, 4)
REPLICA = LogicalRank(dp=1)
SHAPE = RingShape.equal(capacity=9, buffer_bytes=8, max_parts=1)
PACKED = RingShape(9, 8, 1, room_bytes=6 * PAGE_BYTES, granule_bytes=PAGE_BYTES)


class Copies:
    """Gets slots out of rings of copies, as from servers; notes what is sent off.

    Attributes:
        held: the ring that all have but those with one of their own in `rings`.
    """

    def __init__(self, own, held):
        self._own, self.held, self.rings = own, held, {}
        self.asked, self.landed = [], []

    def fetch(self, process, key, needed):
        self.asked.append((process, key.slot))
        if process == SILENT:
            raise FetchError("no answer")
        ring = self.rings.get(process, self.held)
        record = ring.record(key.step)
        self._own.get(record, needed, lay=key.owner == RANK)[:8] = ring.payload(record)
        self._own.publish(record)

    def land_for(self, slots):
        self.landed.extend((record.step, lacking) for record, lacking in slots)


@pytest.fixture
def memory(shared_memory, request):
    """The memory of a process that kept all slots of a window for the rank that it occupies now."""
    shape = getattr(request, "param", SHAPE)
    with StoreDirectory(shared_memory, StoreIdentity("run", "0123"), PROCESS) as store:
        own = store.ring(RingRole.OWN, RANK, shape)
        held = store.ring(RingRole.HELD, RANK, shape)
        _fill(held)
        copies = Copies(own, held)
        yield SimpleNamespace(host=SimpleNamespace(process=PROCESS), own_ring=own, copies=copies)


def _fill(ring, window=WINDOW):
    for slot in range(window.size):
        step = window.start + slot
        payload = ring.reserve(step)[:8]
        payload[:] = bytes([step]) * 8
        part = SlotPart.of("head", 0, payload)
        ring.publish(SlotRecord(0, window, slot, step, 8, (part,)))


def fetch_of(slot, *sources, owner=RANK, window=WINDOW):
    return SlotFetch(RANK, SlotKey(owner, window, slot), sources)


def plan_of(fetches):
    steps = [fetch.slot.step for fetch in fetches]
    return RankPlan(
        RANK,
        start=min(steps),
        origin=Origin.WINDOW,
        converts=True,
        copied_from=None,
        fetches=tuple(fetches),
        sends=(),
        oldest=min(steps),
        next_step=max(steps) + 1,
        guarded=None,
    )


def test_slots_that_were_only_kept_for_the_rank_come_into_its_ring(memory):
    """Else nobody sends them, the window is never complete, and all wait once the ring is full."""
    fetch_slots(memory, plan_of([fetch_of(slot, PROCESS, OTHER) for slot in range(3)]))
    assert [record.step for record in memory.own_ring.records()] == [0, 1, 2]
    assert memory.copies.asked == [(PROCESS, 0), (PROCESS, 1), (PROCESS, 2)]


def test_a_slot_that_the_ring_has_is_not_fetched_again(memory):
    fetch_slots(memory, plan_of([fetch_of(1, PROCESS)]))
    fetch_slots(memory, plan_of([fetch_of(1, PROCESS, OTHER), fetch_of(2, PROCESS)]))
    assert memory.copies.asked == [(PROCESS, 1), (PROCESS, 2)]


def test_a_slot_of_another_process_replaces_what_the_ring_has(memory):
    fetch_slots(memory, plan_of([fetch_of(1, PROCESS)]))
    fetch_slots(memory, plan_of([fetch_of(1, OTHER)]))
    assert memory.copies.asked == [(PROCESS, 1), (OTHER, 1)]


def test_the_next_source_gives_what_the_first_one_does_not(memory):
    fetch_slots(memory, plan_of([fetch_of(1, SILENT, OTHER)]))
    assert memory.copies.asked == [(SILENT, 1), (OTHER, 1)]
    with pytest.raises(FetchError):
        fetch_slots(memory, plan_of([fetch_of(2, SILENT)]))


@pytest.mark.parametrize("memory", [PACKED], indirect=True)
@pytest.mark.parametrize(
    "of_replica", [{4}, {6}, {7}, {4, 5}, {4, 6}, {5, 7}, {4, 5, 6, 7}], ids=str
)
def test_slots_of_a_replica_take_the_room_of_no_other(memory, of_replica):
    ring, window = memory.own_ring, Window(4, 4)  # which begins in the middle of the ring
    _fill(memory.copies.held, window)
    ring.reserve(9, PAGE_BYTES)  # of a plan that is no more
    fetches = [
        SlotFetch(RANK, SlotKey(owner, window, step - window.start), (OTHER,))
        for step in range(4, 8)
        for owner in ([REPLICA] if step in of_replica else [RANK])
    ]
    fetch_slots(memory, plan_of(fetches))
    assert [bytes(ring.payload(ring.held(step)))[0] for step in range(4, 8)] == [4, 5, 6, 7]


@pytest.mark.parametrize("memory", [PACKED], indirect=True)
@pytest.mark.parametrize(
    ("there", "formerly", "before"),
    [({6, 7}, {4, 5}, 3), (set(), {4, 6}, 3), (set(), {5, 7}, 3), ({5}, {4, 6}, 5), ({4}, {6}, 1)],
    ids=str,
)
def test_slots_that_lie_otherwise_at_two_holders_all_find_room(
    memory, shared_memory, there, formerly, before
):
    """They were placed again once nobody had them; then a process came back that has them."""
    ring, window = memory.own_ring, Window(4, 4)
    _fill(memory.copies.held, window)
    with StoreDirectory(shared_memory, StoreIdentity("run", "0123"), OTHER) as store:
        back = store.ring(RingRole.HELD, RANK, PACKED)
        for _ in range(before):
            back.reserve(3, PAGE_BYTES * before)  # so many pages lie in front of them
        _fill(back, window)
        memory.copies.rings[OTHER] = back
        known = [fetch_of(step - 4, PROCESS, window=window) for step in sorted(there)]
        if known:
            fetch_slots(memory, plan_of(known))
        fetches = [
            fetch_of(step - 4, OTHER if step in formerly else PROCESS, window=window)
            for step in range(4, 8)
        ]
        fetch_slots(memory, plan_of(fetches))
        held = [ring.held(step) for step in range(4, 8)]
        assert [bytes(ring.payload(record))[0] for record in held] == [4, 5, 6, 7]
        for step in (8, 9):  # the rest of the ring is left for what is captured next
            ring.reserve(step, PAGE_BYTES, needed=range(4, step))


def test_what_holders_lack_is_sent_to_them(memory):
    fetch_slots(memory, plan_of([fetch_of(slot, PROCESS) for slot in (1, 2)]))
    send_slots(memory, [SlotSend(SlotKey(RANK, WINDOW, slot), to) for slot, to in TO.items()])
    assert memory.copies.landed == [*TO.items()]


TO = {1: (OTHER,), 2: ()}
