# SPDX-License-Identifier: Apache-2.0
"""What a member of a barrier asks of the store does not grow with the members; nobody is lost."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import BarrierOverflow, BarrierTimeout

from megatron_moevement.integrations.nvrx import sealed_store
from megatron_moevement.policy.watching import short_lists
from megatron_moevement.policy.watching.short_lists import ENTRIES
from megatron_moevement.runtime.coordination import attendance
from megatron_moevement.runtime.coordination.attendance import Attendance
from tests.harness.counting_store import CountingStore, SealedMember, SharedKeys
from tests.harness.stepped_roll_call import Clock

LONG, NO_TIME = timedelta(seconds=60), timedelta(0)
SIZES = (64, 128)
LARGEST = 100 * ENTRIES
"""Bytes of a list that is full, some of its entries twice."""
REQUESTS = 20
"""Of an arrival, and of a look."""


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(sealed_store, "_LOOK_S", 0.02)


def arrive(keys, rank, members, timeout=NO_TIME):
    """Has a rank arrive; returns its store."""
    store = SealedMember(keys)
    store.iteration_barrier(
        ranks=[rank], rendezvous_count=members, timeout=timeout, timeout_chunk=timeout
    )
    return store


def is_complete(keys, members):
    try:
        arrive(keys, 0, members, timedelta(milliseconds=1))
    except BarrierTimeout:
        return False
    return True


def waiting(keys, rank, members):
    """Returns a thread in which a rank waits, and its store."""
    store = SealedMember(keys)
    thread = threading.Thread(
        target=store.iteration_barrier,
        kwargs={"ranks": [rank], "rendezvous_count": members, "timeout": LONG}
        | {"timeout_chunk": timedelta(milliseconds=5)},
        daemon=True,
    )
    thread.start()
    return thread, store


def await_looks(store, number):
    """Waits until a store has looked so often, or has ended."""
    for _ in range(6000):
        if store.load.requests["get"] >= number:
            return
        threading.Event().wait(0.01)
    raise AssertionError(store.load)


def test_arrivals_cost_the_store_twice_as_much_where_twice_as_many_come():
    of_all = {}
    for members in SIZES:
        keys = SharedKeys()
        loads = [arrive(keys, rank, members).load for rank in range(members)]
        assert is_complete(keys, members)
        assert max(load.requests.total() for load in loads) <= REQUESTS
        assert max(load.largest() for load in loads) <= LARGEST
        of_all[members] = sum(load.read_bytes for load in loads)
    assert of_all[128] <= 2.3 * of_all[64]


@pytest.mark.parametrize("members", SIZES)
def test_a_look_of_a_member_that_waits_reads_short_lists(members):
    keys = SharedKeys()
    for rank in range(2, members):
        arrive(keys, rank, members)
    thread, store = waiting(keys, 0, members)
    await_looks(store, 40)
    assert thread.is_alive()
    load = store.load
    assert load.largest() <= LARGEST
    assert load.requests["append"] == 1
    arrive(keys, 1, members)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("members", [2, ENTRIES, ENTRIES + 1, 2 * ENTRIES, 1100])
def test_a_barrier_is_complete_with_the_last_arrival_and_not_before(members):
    keys = SharedKeys()
    for rank in reversed(range(1, members)):
        arrive(keys, rank, members)
    before = dict(keys.values)
    assert not any(key.endswith(":complete") for key in before)
    assert is_complete(keys, members)


@pytest.mark.parametrize("what", ["arrived", "arrived:0.1", "arrived:1.0", ""])
def test_what_a_stranger_removes_is_written_again_while_ranks_wait(what):
    keys, members = SharedKeys(), ENTRIES + 4
    last = 0 if what == "arrived" else members - 1  # of the list that is removed
    ranks = [waiting(keys, rank, members) for rank in range(members) if rank != last]
    for _, store in ranks:
        await_looks(store, 2)
    keys.remove(what)
    arrive(keys, last, members)  # it waits for nobody, as one that a monitor speaks for
    for thread, _ in ranks:
        thread.join(30)
        assert not thread.is_alive()


def test_what_a_stranger_adds_does_not_count():
    keys, members = SharedKeys(), 2 * ENTRIES
    for rank in range(members - 1):
        arrive(keys, rank, members)
    stranger = SealedMember(keys, b"x" * 64)
    arrivals = stranger._arrivals(stranger.ITERATION_BARRIER, members)
    arrivals.note_whole(1)
    for rank in range(members):
        stranger.append(*stranger._line(arrivals.key(rank // ENTRIES), [rank]))
    stranger.append(stranger._arrived(stranger.ITERATION_BARRIER), "\nno seal\n")
    assert not is_complete(keys, members)


def test_who_writes_its_arrival_again_sees_whether_its_list_is_whole_with_it(monkeypatch):
    keys, waits = SharedKeys(), []

    def wait(store, awaited, _):
        waits.append(awaited)
        if len(waits) == 1:
            keys.remove("arrived")
            arrive(keys, 1, 2)
        CountingStore.wait(store, awaited, NO_TIME)

    monkeypatch.setattr(sealed_store, "_LOOK_S", 0.0)
    monkeypatch.setattr(SealedMember, "wait", wait)
    arrive(keys, 0, 2, LONG)
    assert len(waits) == 2


@pytest.mark.parametrize("limit_s", [1.0, 3.0, 8.0])
def test_at_most_a_quarter_of_a_barriers_limit_passes_between_two_looks(monkeypatch, limit_s):
    clock, keys, lasted_s = Clock(), SharedKeys(), []

    def wait(store, awaited, timeout):
        lasted_s.append(timeout.total_seconds())
        clock.now_s += timeout.total_seconds()
        if len(lasted_s) == 1:
            keys.remove("arrived")
            arrive(keys, 1, 2)
        CountingStore.wait(store, awaited, NO_TIME)

    monkeypatch.setattr(sealed_store, "_LOOK_S", 1.0)
    monkeypatch.setattr(sealed_store, "time", clock)
    monkeypatch.setattr(attendance, "time", clock)
    monkeypatch.setattr(SealedMember, "wait", wait)
    arrive(keys, 0, 2, timedelta(seconds=limit_s))
    assert lasted_s[0] <= limit_s / 4


def test_no_slice_of_a_barrier_lasts_beyond_its_limit(monkeypatch):
    clock, ends_s = Clock(), []

    def wait(store, keys, timeout):
        ends_s.append(clock.now_s + timeout.total_seconds())
        clock.now_s = ends_s[-1] + 0.03  # the system is busy
        CountingStore.wait(store, keys, NO_TIME)

    for module in (sealed_store, attendance):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(sealed_store, "_LOOK_S", 0.1)
    monkeypatch.setattr(SealedMember, "wait", wait)
    with pytest.raises(BarrierTimeout):
        arrive(SharedKeys(), 0, 2, timedelta(seconds=0.4))
    assert max(ends_s) == pytest.approx(0.4)
    assert ends_s == sorted(set(ends_s))  # none had no time at all, which is no limit


def test_others_note_that_a_list_is_whole_whose_ranks_died_before_they_could(monkeypatch):
    keys, members = SharedKeys(), 2 * ENTRIES
    with monkeypatch.context() as patch:
        patch.setattr(Attendance, "note_whole", lambda *_: False)
        for rank in range(ENTRIES, members):
            arrive(keys, rank, members)
    ranks = [waiting(keys, rank, members)[0] for rank in range(ENTRIES)]
    for thread in ranks:
        thread.join(30)
        assert not thread.is_alive()


def sent(keys, ranks, host="node{node}"):
    """Returns the stores of ranks that have written what others read at the start."""
    stores = [SealedMember(keys) for _ in range(ranks)]
    for rank, store in enumerate(stores):
        store.send_state(State(rank=rank, world_size=ranks), rank)
        store.send_key(["job", f"node{rank // 8}"], rank)
        store.send_host(host.format(node=rank // 8, rank=rank), rank)
    return stores


def who_takes_part(store, ranks):
    states = [(state.rank, state.world_size) for state in store.get_states(range(ranks))]
    return states, store.get_keys(range(ranks)), store.get_hosts(range(ranks))


def test_who_takes_part_is_read_in_a_few_short_answers():
    largest = {}
    for ranks in SIZES:
        stores = sent(SharedKeys(), ranks)
        found = [who_takes_part(store, ranks) for store in stores]
        states = [(rank, ranks) for rank in range(ranks)]
        nodes = [f"node{rank // 8}" for rank in range(ranks)]
        assert found == [(states, [["job", node] for node in nodes], nodes)] * ranks
        loads = [store.load for store in stores[1:]]
        assert max(load.requests.total() for load in loads) <= REQUESTS
        largest[ranks] = max(load.read_bytes for load in loads)
    assert largest[128] <= 10 * 128  # bytes; it grows with the nodes
    stranger = SealedMember(stores[0].keys)
    assert who_takes_part(stranger, ranks) == found[0]  # one that took no part reads all


@pytest.mark.parametrize("what", ["state_3", "state_of_all"])
def test_what_a_stranger_overwrites_at_the_start_is_written_again(what):
    stores = sent(SharedKeys(), 4)
    stores[0].set(what, b"a stranger's")
    others = [
        threading.Thread(target=store.get_states, args=(range(4),), daemon=True)
        for store in stores[1:]
    ]
    for thread in others:
        thread.start()
    stores[0].get_states(range(4))
    for thread in others:
        thread.join(30)
        assert not thread.is_alive()


def test_what_a_stranger_overwrites_when_the_first_has_read_it_is_read_where_each_wrote_it():
    stores = sent(SharedKeys(), 4)
    stores[0].get_states(range(4))
    stores[0].set("state_of_all", b"a stranger's")
    found = [(each.rank, each.world_size) for each in stores[1].get_states(range(4))]
    assert found == [(rank, 4) for rank in range(4)]


def test_what_a_stranger_removes_when_the_first_has_read_it_is_read_where_each_wrote_it(
    monkeypatch,
):
    monkeypatch.setattr(SealedMember, "timeout", timedelta(seconds=0.3))
    stores = sent(SharedKeys(), 4)
    stores[0].get_states(range(4))
    stores[0].keys.remove("state_of_all")
    found = [(each.rank, each.world_size) for each in stores[1].get_states(range(4))]
    assert found == [(rank, 4) for rank in range(4)]


@pytest.mark.parametrize("is_foreign", [True, False])
def test_who_waits_for_the_first_looks_often_and_a_few_seconds_more_than_its_limit(
    monkeypatch, is_foreign
):
    clock, starts_s, ranks = Clock(), [], 8 * 4096
    slice_s = short_lists.slice_s(0, ranks)

    def wait(store, keys, timeout):
        starts_s.append(clock.now_s)
        try:
            CountingStore.wait(store, keys, NO_TIME)
        except dist.DistStoreError:
            clock.now_s += timeout.total_seconds()
            raise

    for module in (sealed_store, attendance):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(SealedMember, "wait", wait)
    monkeypatch.setattr(SealedMember, "timeout", timedelta(seconds=2.5 * slice_s))
    store = SealedMember(SharedKeys())
    store.send_state(State(rank=1, world_size=ranks), 1)
    if is_foreign:
        store.set("state_of_all", b"a stranger's")
    with pytest.raises(dist.DistStoreError):
        store.get_states(range(ranks))
    assert starts_s == [0.0, slice_s, 2 * slice_s, 2.5 * slice_s]
    assert clock.now_s == 2.5 * slice_s + sealed_store.READING_S


def test_what_is_too_long_for_one_place_is_read_where_each_wrote_it(monkeypatch):
    monkeypatch.setattr(sealed_store, "_MOST_CHARACTERS", 100)
    stores = sent(SharedKeys(), 8, host="node-of-{rank}")
    found = [who_takes_part(store, 8)[2] for store in stores]
    assert found == [[f"node-of-{rank}" for rank in range(8)]] * 8


def test_more_than_are_expected_are_refused():
    keys = SharedKeys()
    with pytest.raises(BarrierOverflow):
        arrive(keys, ENTRIES, ENTRIES)
    store = SealedMember(keys)
    arrival = {"ranks": [ENTRIES], "rendezvous_count": ENTRIES + 1, "timeout": NO_TIME}
    store.completion_barrier(**arrival)
    with pytest.raises(BarrierOverflow):
        store.completion_barrier(**arrival)


def test_an_arrival_is_found_by_its_rank():
    keys = SharedKeys()
    store = arrive(keys, ENTRIES + 3, 2 * ENTRIES)
    found = [
        rank
        for rank in range(2 * ENTRIES)
        if store.is_rank_at_reentrant_barrier(rank, store.ITERATION_BARRIER)
    ]
    assert found == [ENTRIES + 3]
