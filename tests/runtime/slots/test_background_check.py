# SPDX-License-Identifier: Apache-2.0
"""Damage of a slot in memory is found while nobody needs the slot."""

import queue
import threading

import pytest

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.watching.reading_pace import ReadingPace
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots import background_check
from megatron_moevement.runtime.slots.background_check import BackgroundCheck, CpuTimes
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity

PIECES = 5
PART_BYTES = PIECES * background_check.PIECE_BYTES - 3
FAST = ReadingPace(1 << 40, cpu_share=1.0)
PATIENCE_S = 60


@pytest.fixture
def ring(tmp_path):
    shape = RingShape.equal(capacity=2, buffer_bytes=2 * PART_BYTES, max_parts=2)
    made = RingFile.create(
        tmp_path / "ring", StoreIdentity("run", "0123"), LogicalRank(dp=1), shape
    )
    for step in range(2):
        hold(made, step)
    yield made
    made.close()


def hold(ring, step):
    payload = ring.reserve(step)
    payload[:] = bytes([step + 1]) * len(payload)
    parts = tuple(
        SlotPart.of(name, start, payload[start : start + PART_BYTES])
        for name, start in (("first:full", 0), ("second:full", PART_BYTES))
    )
    ring.publish(SlotRecord(0, Window(0, 2, 0), step, step, len(payload), parts))


def test_a_damaged_slot_is_told_of_once_and_its_ring_is_doubted(ring):
    told = queue.SimpleQueue()
    ring.buffer(1)[PART_BYTES + 7] ^= 1
    with BackgroundCheck(lambda: (ring,), lambda *found: told.put(found), FAST):
        found, record, parts = told.get(timeout=PATIENCE_S)
        assert (found, record, parts) == (ring, ring.held(1), ("second:full",))
        assert ring.is_doubted
        ring.buffer(0)[0] ^= 1  # of a slot that was intact before
        assert told.get(timeout=PATIENCE_S)[1:] == (ring.held(0), ("first:full",))
    assert told.empty()


def test_intact_slots_are_read_in_pieces_and_left_alone(ring, monkeypatch):
    read = queue.SimpleQueue()

    def count(pieces):
        sizes = []
        checksum = checksum_of_pieces(piece for piece in pieces if not sizes.append(len(piece)))
        read.put(sizes)
        return checksum

    checksum_of_pieces = background_check.checksum_of_pieces
    monkeypatch.setattr(background_check, "checksum_of_pieces", count)
    with BackgroundCheck(lambda: (ring,), lambda *found: pytest.fail(f"{found}"), FAST):
        for _ in range(4):  # parts of the ring
            sizes = read.get(timeout=PATIENCE_S)
            assert (len(sizes), sum(sizes)) == (PIECES, PART_BYTES)
            assert max(sizes) == background_check.PIECE_BYTES
    assert not ring.is_doubted


def test_each_piece_is_paused_for_and_a_check_is_given_up_between_pieces(ring):
    asked = queue.SimpleQueue()
    check = BackgroundCheck(
        lambda: asked.put(None) or (ring,), lambda *found: pytest.fail(f"{found}"), ReadingPace(1)
    )
    asked.get(timeout=PATIENCE_S)  # one byte a second: the first pause takes weeks
    check.close()
    assert "background-check" not in {thread.name for thread in threading.enumerate()}


def test_a_ring_that_is_closed_meanwhile_ends_nothing(ring):
    told, asked = queue.SimpleQueue(), queue.SimpleQueue()
    ring.close()
    with BackgroundCheck(lambda: asked.put(None) or (ring,), told.put, FAST):
        for _ in range(2):
            asked.get(timeout=PATIENCE_S)
    assert told.empty()


def test_what_is_read_is_bounded_by_the_processor_time_that_passed(ring, monkeypatch):
    read, checksum_of_pieces = [], background_check.checksum_of_pieces
    passed_s, looked = [0.0], threading.Semaphore(0)

    def count(pieces):
        return checksum_of_pieces(piece for piece in pieces if not read.append(len(piece)))

    def cpu_times():
        looked.release()
        return CpuTimes(len(read) * 0.001, passed_s[0])

    monkeypatch.setattr(background_check, "checksum_of_pieces", count)
    monkeypatch.setattr(background_check, "_LONGEST_PAUSE_S", 0.001)
    told = queue.SimpleQueue()
    ring.buffer(1)[-1] ^= 1  # in the last piece of all
    pace = ReadingPace(1 << 40, cpu_share=1 / 256)
    with BackgroundCheck(lambda: (ring,), lambda *found: told.put(found), pace, cpu_times):
        for pieces in (1, 3, 11):
            passed_s[0] = pieces * 0.256 - 0.001
            while looked.acquire(blocking=False):
                pass
            for _ in range(100):
                assert looked.acquire(timeout=PATIENCE_S)
            assert len(read) == pieces
        assert told.empty()
        passed_s[0] = 100.0
        assert told.get(timeout=PATIENCE_S)[1:] == (ring.held(1), ("second:full",))
