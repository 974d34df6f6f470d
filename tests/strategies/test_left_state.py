# SPDX-License-Identifier: Apache-2.0
"""What a former launch left in a process's memory, as the facts of a recovery."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.facts.facts import Condition, Holding
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.faults.fault_points import NO_FAULTS
from megatron_moevement.runtime.slots import slot_record
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
)
from megatron_moevement.strategies.moevement.protection.holdings import Holdings
from megatron_moevement.strategies.moevement.protection.host_memory import Endpoint, HostMemory
from megatron_moevement.strategies.moevement.protection.left_state import (
    read_left_state,
    rng_equal_steps,
)
from megatron_moevement.strategies.moevement.protection.resident_store import ResidentStore
from megatron_moevement.strategies.scalars import encode_entry
from tests.harness.one_schedule import one_schedule

RANK, OTHER = LogicalRank(dp=0), LogicalRank(dp=1)
HOST = Host(4, "node", RANK)
IDENTITY = StoreIdentity("run", "0123")
PERSISTED = Window(2, 2, 1)
STATE = JournalState(
    rollbacks=1, timetable=one_schedule(2, 1), committed=5, persisted=PERSISTED, rank=RANK
)
RING = RingShape.equal(capacity=5, buffer_bytes=100, max_parts=2)
JOURNAL = JournalShape(retained_steps=6, entry_bytes=100, last_step=20, schedule_bytes=8)
SCHEDULES = dict.fromkeys(STATE.timetable.digests(), b"slots")


@pytest.fixture
def store(tmp_path):
    with StoreDirectory(tmp_path, IDENTITY, 4) as opened:
        yield opened


def hold(ring, step, rollbacks=1, schedule_version=1):
    payload = ring.reserve(step)[:40]
    payload[:] = bytes([step]) * 40
    part = SlotPart.of("head:full", 0, payload)
    window = Window(step - step % 2, 2, schedule_version)
    ring.publish(SlotRecord(rollbacks, window, step % 2, step, 40, (part,)))


def leave(store):
    """Leaves what a launch leaves that died at step 5: its slots, copies, the journal."""
    journal = store.journal(JOURNAL)
    journal.keep_schedules(SCHEDULES)
    for step in range(1, 6):
        state = dataclasses.replace(STATE, committed=step)
        journal.commit(state, step, b"entry", 0.5 * step)
    own, held = (
        store.ring(role, rank, RING)
        for role, rank in ((RingRole.OWN, RANK), (RingRole.HELD, OTHER))
    )
    for step in range(2, 6):
        hold(own, step)
    hold(held, 3)
    return own, held


def test_a_process_without_a_store_knows_nothing(store):
    facts = read_left_state(store, HOST, 0)
    assert (facts.process, facts.domain, facts.rank) == (4, "node", RANK)
    assert (facts.committed, facts.persisted, facts.holdings) == (None, None, ())
    assert facts.live.condition is Condition.ABSENT


def test_what_was_left_is_told(store):
    leave(store)
    facts = read_left_state(store, HOST, 0)
    assert (facts.committed, facts.persisted) == (5, PERSISTED)
    assert (facts.rollbacks, facts.timetable, facts.ledger) == (1, STATE.timetable, range(1, 6))
    assert facts.holdings == (
        Holding(RANK, PERSISTED, 0b11),
        Holding(RANK, Window(4, 2, 1), 0b11),
        Holding(OTHER, PERSISTED, 0b10),
    )
    assert facts.live.condition is Condition.ABSENT


def test_streams_were_alike_since_the_last_step_where_they_were_not(store):
    assert rng_equal_steps(store) == range(0)
    journal = store.journal(dataclasses.replace(JOURNAL, entry_bytes=1000))
    for step, alike in enumerate((True, False, True, True), start=1):
        entry = LedgerEntry(
            step, 1.0, 0, 1.0, (False,), 1.0, 1.0, 1, (), (None,), None, rng_equal=alike
        )
        state = dataclasses.replace(STATE, committed=step)
        journal.commit(state, step, encode_entry(entry), 1.0)
    assert rng_equal_steps(store) == range(3, 5)


def test_a_damaged_slot_does_not_count(store):
    own, held = leave(store)
    own.buffer(2)[7] ^= 1
    held.buffer(3)[0] ^= 128
    assert read_left_state(store, HOST, 0).holdings == (
        Holding(RANK, PERSISTED, 0b10),
        Holding(RANK, Window(4, 2, 1), 0b11),
    )


@pytest.fixture
def hashed(monkeypatch):
    """Counts the bytes of slots that are hashed."""
    counted = []

    def count(data):
        counted.append(len(data))
        return checksum_of(data)

    monkeypatch.setattr(slot_record, "checksum_of", count)
    return counted


def test_a_launch_reads_all_slots_and_a_restart_none(store, hashed):
    leave(store)
    del hashed[:]
    held = read_left_state(store, HOST, 0).holdings
    assert sum(hashed) == 5 * 40
    del hashed[:]
    assert read_left_state(store, HOST, 1).holdings == held
    assert hashed == []


def test_a_restart_reads_a_ring_in_which_a_slot_was_found_damaged(store, hashed):
    own, held = leave(store)
    for step in (2, 4):
        own.buffer(step)[7] ^= 1
    held.buffer(3)[0] ^= 1
    assert own.damaged_parts(own.held(2)) == ("head:full",)
    del hashed[:]
    assert read_left_state(store, HOST, 1).holdings == (
        Holding(RANK, PERSISTED, 0b10),
        Holding(RANK, Window(4, 2, 1), 0b10),
        Holding(OTHER, PERSISTED, 0b10),  # of another ring, which nobody has read
    )
    assert sum(hashed) == 3 * 40


def test_a_ring_is_read_once_for_what_was_found_in_it(store, hashed):
    own, _ = leave(store)
    for step in (2, 4):  # the second one is found by who reads because of the first one
        own.buffer(step)[7] ^= 1
    assert own.damaged_parts(own.held(2)) == ("head:full",)
    lacking = read_left_state(store, HOST, 1).holdings
    del hashed[:]
    assert read_left_state(store, HOST, 2).holdings == lacking
    assert hashed == []


def test_a_slot_counts_again_once_it_is_captured_again(store):
    own, _ = leave(store)
    whole = read_left_state(store, HOST, 0).holdings
    own.buffer(2)[7] ^= 1
    record = own.held(2)
    assert own.damaged_parts(record) == ("head:full",)
    assert read_left_state(store, HOST, 1).holdings != whole
    own.invalidate(2)
    own.buffer(2)[7] ^= 1
    own.publish(record)
    assert read_left_state(store, HOST, 2).holdings == whole


def test_a_slot_that_is_replaced_while_it_is_read_is_no_damage(store):
    own, _ = leave(store)
    record = own.held(2)
    own.invalidate(2)
    own.buffer(2)[7] ^= 1
    assert own.damaged_parts(record) == ("head:full",)
    assert not own.is_doubted


def test_a_torn_slot_does_not_count(store):
    own, _ = leave(store)
    own.invalidate(5)
    assert Holding(RANK, Window(4, 2, 1), 0b01) in read_left_state(store, HOST, 0).holdings


def test_slots_from_before_a_rollback_do_not_count(store):
    own, _ = leave(store)
    hold(own, 4, rollbacks=0)
    assert Holding(RANK, Window(4, 2, 1), 0b10) in read_left_state(store, HOST, 0).holdings


def test_slots_without_a_journal_do_not_count(store):
    leave(store)
    (journal,) = [path for path in store.folder.iterdir() if "journal" in path.name]
    store.close()
    journal.unlink()
    with StoreDirectory(store.root, IDENTITY, 4) as reopened:
        facts = read_left_state(reopened, HOST, 0)
    assert (facts.committed, facts.holdings) == (None, ())


def test_the_store_of_another_job_is_refused(store):
    leave(store)
    store.close()
    with (
        StoreDirectory(store.root, StoreIdentity("run", "4567"), 4) as other,
        pytest.raises(UserError, match="another"),
    ):
        read_left_state(other, HOST, 0)


class CutError(Exception):
    """Ends a beginning where a death would."""


@pytest.mark.parametrize("place", ["clear_rings", "open"])
def test_a_beginning_that_is_cut_leaves_a_journal_of_the_state_that_it_begins_at(
    store, monkeypatch, place
):
    def cut():
        raise CutError

    leave(store)
    account = SimpleNamespace(total_bytes=0)
    plan = SimpleNamespace(journal=JOURNAL, spares=(), account_of=lambda _: account)
    with Generation() as generation:
        me = (b"a token of this test", HOST.process, "127.0.0.1")
        endpoint = Endpoint(*me, generation, NO_FAULTS)
        holdings, kept = Holdings(plan, HOST, store), ResidentStore()
        memory = HostMemory(holdings, endpoint, kept, torch.device("cpu"), lambda _: None)
        monkeypatch.setattr(memory if place == "open" else store, place, cut)
        with pytest.raises(CutError):
            memory.restart_windows(
                dataclasses.replace(STATE, rollbacks=2, committed=9, persisted=None), {}, SCHEDULES
            )
    store.close()
    with StoreDirectory(store.root, IDENTITY, HOST.process) as reopened:
        facts = read_left_state(reopened, HOST, 0)
    assert (facts.committed, facts.persisted, facts.rollbacks) == (9, None, 2)
    assert (facts.holdings, len(facts.ledger)) == ((), 0)
