# SPDX-License-Identifier: Apache-2.0
"""Why a generation ended costs the store twice as much where twice as many processes ask."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from nvidia_resiliency_ext.inprocess.attribution import Interruption as Reason
from nvidia_resiliency_ext.inprocess.attribution import InterruptionRecord

from megatron_moevement.integrations.nvrx import sealed_store
from megatron_moevement.integrations.nvrx.rank_assignment import StickyRankAssignment
from megatron_moevement.policy.watching.short_lists import ENTRIES
from megatron_moevement.runtime.coordination.generation import Interruption
from megatron_moevement.settings.restart import Granularity
from tests.harness.counting_store import SealedMember, SharedKeys

LONG, NO_TIME = timedelta(seconds=60), timedelta(0)
FACTOR = 2.2
LARGEST = 100 * ENTRIES
"""Bytes of an answer to a process that does not read for all."""
REASONS = (Reason.EXCEPTION, Reason.SOFT_TIMEOUT)


class KilledError(Exception):
    """Ends a process in the midst of its requests."""


class DyingMember(SealedMember):
    """A process that is killed when it asks for something of a key."""

    def __init__(self, keys, request, ending):
        super().__init__(keys)
        self._request, self._ending = request, ending

    def get(self, key):
        self._die("get", key)
        return super().get(key)

    def compare_set(self, key, expected, desired):
        self._die("compare_set", key)
        return super().compare_set(key, expected, desired)

    def _die(self, request, key):
        if request == self._request and key.endswith(self._ending):
            raise KilledError


class MeetingMember(SealedMember):
    """A process that arrives when all others do: none looks before all have arrived."""

    def __init__(self, keys, meet):
        super().__init__(keys)
        self._meet = meet

    def append(self, key, value):
        super().append(key, value)
        if self._meet is not None:
            meet, self._meet = self._meet, None
            meet.wait(30)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(sealed_store, "_LOOK_S", 0.02)


def arrive(store, rank, members, timeout=NO_TIME):
    store.iteration_barrier(
        ranks=[rank], rendezvous_count=members, timeout=timeout, timeout_chunk=timeout
    )


def in_thread(store, rank, members):
    """Returns a thread in which a rank arrives, and waits for the others."""
    thread = threading.Thread(target=arrive, args=(store, rank, members, LONG), daemon=True)
    thread.start()
    return thread


def await_waits(store):
    """Waits until a process waits."""
    for _ in range(3000):
        if store.load.requests["wait"]:
            return
        threading.Event().wait(0.01)
    raise AssertionError(store.load)


def interrupted(keys, members):
    """Has each rank add a reason, those of two kinds in turn."""
    writer = SealedMember(keys)
    for rank in range(members):
        writer.record_interrupted([InterruptionRecord(rank, REASONS[rank % 2])])
    writer.lock_interruption_records()


def readers(stores):
    """Returns how many have read all reasons."""
    return sum(SealedMember.INTERRUPTION_RECORDS in store.load.read for store in stores)


def losses(store, members):
    """Returns what a process finds of why a generation ended."""
    assignment = StickyRankAssignment(
        *(members, Granularity.RANK, "domain", Interruption(), range(members)),
        ends=lambda awaited: {},
    )
    assignment.rank_map = {
        rank: SimpleNamespace(state=SimpleNamespace(initial_rank=rank, active_rank=rank))
        for rank in range(members)
    }
    ctx = SimpleNamespace(store=store, terminated_ranks=store.get_terminated_ranks())
    return assignment._losses(ctx)


def test_why_a_generation_ended_costs_twice_as_much_where_twice_as_many_ask():
    of_all, large = {}, {}
    for members in (128, 256):
        keys = SharedKeys()
        interrupted(keys, members)
        stores = [SealedMember(keys) for _ in range(members)]
        for rank, store in enumerate(stores):
            store.get_interruption_records()  # as NVRx's thread does, that interrupts
            arrive(store, rank, members)
        found = set()
        for store in stores:
            store.wake()
            found.add(losses(store, members))
        assert len(found) == 1
        of_all[members] = sum(store.load.read_bytes for store in stores)
        large[members] = sum(store.load.largest() > LARGEST for store in stores)
    assert of_all[256] <= FACTOR * of_all[128]
    assert large == {128: 1, 256: 1}


def test_one_process_reads_all_reasons_though_all_find_at_once_that_all_have_arrived():
    keys, members = SharedKeys(), 2 * ENTRIES
    interrupted(keys, members)
    meet = threading.Barrier(members)
    stores = [MeetingMember(keys, meet) for _ in range(members)]
    threads = [in_thread(store, rank, members) for rank, store in enumerate(stores)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert readers(stores) == 1


@pytest.mark.parametrize(
    ("request_", "ending"),
    [("get", SealedMember.INTERRUPTION_RECORDS), ("compare_set", ":complete")],
)
def test_one_process_reads_in_the_place_of_a_reader_that_dies(monkeypatch, request_, ending):
    monkeypatch.setattr(sealed_store, "READING_S", 1.0)
    keys, members = SharedKeys(), 4
    interrupted(keys, members)
    stores = [SealedMember(keys) for _ in range(members - 1)]
    threads = [in_thread(store, rank, members) for rank, store in enumerate(stores)]
    for store in stores:
        await_waits(store)
    with pytest.raises(KilledError):
        arrive(DyingMember(keys, request_, ending), members - 1, members, LONG)
    monitor = SealedMember(keys)
    monitor.record_terminated_ranks([members - 1])
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert readers(stores) == 1
    for store in stores:
        assert [loss.rank for loss in losses(store, members)] == [members - 1]
        assert store.get_reasons() == {rank: REASONS[rank % 2].name for rank in range(members)}


def test_whose_process_ended_is_named_though_too_many_have_reasons():
    keys, members = SharedKeys(), 600
    interrupted(keys, members)
    writer, store = SealedMember(keys), SealedMember(keys)
    writer.append(
        *writer._line(writer.INTERRUPTION_RECORDS, str(InterruptionRecord(599, Reason.TERMINATED)))
    )
    writer.record_terminated_ranks([599])
    (loss,) = losses(store, members)
    assert (loss.rank, loss.reason) == (599, "its process has ended")
    assert len(store.get_reasons()) < members / 2
