# SPDX-License-Identifier: Apache-2.0
"""The journal reads back the old state or the new one, whatever cut its writer off."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import (
    MAX_ENTRIES,
    Timetable,
    TimetableEntry,
    Trial,
    WindowDecision,
)
from megatron_moevement.runtime.slots.journal import Journal, JournalShape, JournalState
from megatron_moevement.runtime.slots.mapped_file import PAGE_BYTES
from megatron_moevement.runtime.slots.store_identity import DamagedFileError, StoreIdentity
from tests.harness.one_schedule import one_schedule

from .conftest import IDENTITY, OWNER

RETAINED = 4
LAST_STEP = 100_000


@pytest.fixture
def journal(shared_memory):
    made = make(shared_memory / "journal")
    yield made
    made.close()


def make(path, last_step=LAST_STEP):
    return Journal.create(path, IDENTITY, JournalShape(RETAINED, 64, last_step))


def reopened(journal):
    return Journal.open(journal.path, IDENTITY)


def state_at(step, **changes):
    state = JournalState(
        rollbacks=0,
        timetable=one_schedule(2, step // 10),
        committed=step,
        persisted=Window(step // 2, 2),
        rank=OWNER,
    )
    return dataclasses.replace(state, **changes)


def entry_of(step):
    return json.dumps({"step": step, "pad": "x" * (step % 7)}).encode()


def write(journal, step):
    journal.commit(state_at(step), step, entry_of(step), loss_of(step))


def loss_of(step):
    return struct.unpack("<f", struct.pack("<f", 1 / (step + 1)))[0]


def test_a_new_journal_knows_nothing(journal):
    for each in (journal, reopened(journal)):
        assert each.state is None
        assert each.entries() == range(0)
        assert each.losses() == {}
        with pytest.raises(KeyError):
            each.entry(0)
    assert journal.path.stat().st_size == JournalShape(RETAINED, 64, LAST_STEP).total_bytes


def test_the_newest_steps_keep_their_entries_and_all_their_losses(journal):
    for step in range(1, 11):
        write(journal, step)
    for each in (journal, reopened(journal)):
        assert each.state == state_at(10)
        assert each.entries() == range(7, 11)
        assert [each.entry(step) for step in each.entries()] == [entry_of(k) for k in (7, 8, 9, 10)]
        assert each.losses() == {step: loss_of(step) for step in range(1, 11)}
        for step in (6, 11):
            with pytest.raises(KeyError):
                each.entry(step)


def test_a_spare_and_a_job_without_a_persisted_window_are_states_too(journal):
    state = JournalState(
        rollbacks=2, timetable=one_schedule(2), committed=0, persisted=None, rank=None
    )
    journal.write_state(state)
    assert reopened(journal).state == state


def with_schedules(state, *digests):
    entries = (
        TimetableEntry(version, 2 * version, 2, digest) for version, digest in enumerate(digests)
    )
    return dataclasses.replace(state, timetable=Timetable(tuple(entries)))


def test_a_schedule_is_there_before_a_state_names_it_and_stays_while_one_does(shared_memory):
    shape = JournalShape(RETAINED, 64, LAST_STEP, schedule_bytes=10)
    path = shared_memory / "schedules"
    first = with_schedules(state_at(4), "a")
    made = Journal.create(path, IDENTITY, shape, state=first, schedules={"a": b"1"})
    made.keep_schedules({"a": b"1", "b": b"22"})
    made.write_state(with_schedules(state_at(5), "a", "b"))
    with contextlib.closing(reopened(made)) as other:
        assert other.schedules() == {"a": b"1", "b": b"22"}
    made.write_state(with_schedules(state_at(6), "b"))
    for number in range(20):  # what no state names makes room
        made.keep_schedules({f"tried {number}": b"x" * 10})
        assert made.schedules()["b"] == b"22"
    with pytest.raises(ValueError, match="no room for the schedule c"):
        made.keep_schedules({"c": b"x" * 11})
    one, other = (
        {f"{name} {number}": b"s" for number in range(MAX_ENTRIES)} for name in ("one", "other")
    )
    made.keep_schedules(one)
    made.write_state(with_schedules(state_at(7), *one))
    made.keep_schedules(other)
    assert made.schedules() == {**one, **other}
    with pytest.raises(ValueError, match="no room for the schedule c"):
        made.keep_schedules({**other, "c": b"x"})
    made.close()


def test_there_is_room_for_as_many_schedules_as_a_job_remembers_and_a_decision(journal):
    many, window = 1_000_000_000, 100
    entries = [
        TimetableEntry(many + number, many * window + number * window, window, "f" * 64)
        for number in range(MAX_ENTRIES)
    ]
    trial = Trial(window, 10**12, 1000 / 3, 100 / 3, 10 / 3)
    entries[-1] = entries[-1]._replace(decision=WindowDecision(window, window, many, window, trial))
    state = state_at(
        many * window,
        rollbacks=many,
        timetable=Timetable(tuple(entries), many),
        persisted=Window(many * window, window, many),
        rank=LogicalRank(*[10_000] * 5),
    )
    journal.write_state(state)
    assert reopened(journal).state == state


def test_a_schedule_that_is_damaged_is_not_there(shared_memory):
    shape = JournalShape(RETAINED, 64, LAST_STEP, schedule_bytes=10)
    path = shared_memory / "schedules"
    made = Journal.create(path, IDENTITY, shape, schedules={"a": b"12345"})
    place = path.read_bytes().index(b"12345")
    made.close()
    flip(path, place)
    with contextlib.closing(Journal.open(path, IDENTITY)) as other:
        assert other.schedules() == {}


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


def test_the_persisted_window_is_replaced_alone(journal):
    write(journal, 3)
    journal.write_state(state_at(3, persisted=Window(2, 2, 1)))
    assert reopened(journal).state == state_at(3, persisted=Window(2, 2, 1))
    assert reopened(journal).entry(3) == entry_of(3)


def test_a_replay_writes_a_step_again(journal):
    for step in range(1, 11):
        write(journal, step)
    journal.commit(state_at(10), 8, b"again", loss_of(8))
    assert reopened(journal).entry(8) == b"again"
    assert reopened(journal).entries() == range(7, 11)
    with pytest.raises(ValueError, match="step 6 is not retained at step 10"):
        journal.commit(state_at(10), 6, b"too old", 0.0)


def test_after_a_rollback_nothing_of_the_former_era_counts(journal):
    for step in range(1, 11):
        write(journal, step)
    with pytest.raises(ValueError, match="S_10 is followed by S_8"):
        journal.commit(state_at(8, rollbacks=1), 8, b"", 0.0)
    journal.write_state(state_at(7, rollbacks=1))
    assert journal.entries() == range(7, 8)
    journal.commit(state_at(8, rollbacks=1), 8, b"another", 0.5)
    for each in (journal, reopened(journal)):
        assert each.entries() == range(7, 9)
        assert each.entry(8) == b"another"
        assert each.losses() == {step: loss_of(step) for step in range(1, 8)} | {8: 0.5}
        with pytest.raises(KeyError):
            each.entry(9)


def test_the_loss_history_of_a_checkpoint_is_taken_over(journal):
    journal.restore_losses({1: float("inf"), 2: 0.0, 3: -1.5})
    journal.write_state(state_at(3))
    write(journal, 4)
    assert reopened(journal).losses() == {1: float("inf"), 2: 0.0, 3: -1.5, 4: loss_of(4)}


def test_every_bit_of_a_loss_is_kept(journal):
    bits = {1: 0x7FC00001, 2: 0xFFFFFFFF, 3: 0x80000000, 4: 0x00000001}
    for step, pattern in bits.items():
        (loss,) = struct.unpack("<f", struct.pack("<I", pattern))
        journal.commit(state_at(step), step, b"", loss)
    found = reopened(journal).losses()
    assert {k: struct.unpack("<I", struct.pack("<f", v))[0] for k, v in found.items()} == bits


def test_what_there_is_no_room_for_is_refused(journal):
    with pytest.raises(ValueError, match="an entry of 65 bytes, there is room for 64"):
        journal.commit(state_at(1), 1, bytes(65), 0.0)
    with pytest.raises(ValueError, match="was made for 100000 steps"):
        journal.commit(state_at(LAST_STEP + 1), LAST_STEP + 1, b"", 0.0)
    assert reopened(journal).state is None


def test_the_journal_of_another_job_is_refused(journal):
    with pytest.raises(UserError, match="was left by another job"):
        Journal.open(journal.path, StoreIdentity("run-2", "0123abcd"))


def test_no_flipped_byte_gives_a_state_or_an_entry_that_was_not_written(shared_memory):
    """Flips every byte of a file, one at a time."""
    path = shared_memory / "journal"
    journal = make(path, last_step=12)
    for step in range(1, 7):
        write(journal, step)
    journal.commit(state_at(6), 5, b"again", loss_of(5))
    journal.close()
    entries = {step: entry_of(step) for step in (3, 4, 6)} | {5: b"again"}
    losses = {step: loss_of(step) for step in range(1, 7)}
    whole = path.read_bytes()
    lost = 0
    for at, byte in enumerate(whole):
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([byte ^ (1 + at % 255)]), at)
        try:
            read = Journal.open(path, IDENTITY)
            assert read.state == state_at(6)
            found = {step: read.entry(step) for step in read.entries()}
            assert found.items() <= entries.items()
            assert read.losses().items() <= losses.items()
            lost += len(found) < 4 or len(read.losses()) < 6
            read.close()
        except DamagedFileError:
            assert at < PAGE_BYTES
        path.write_bytes(whole)
    assert lost > 4 * 30 + 6 * 8 - 1


def test_every_order_of_a_cut_commit_reads_back_old_or_new(journal, shared_memory, monkeypatch):
    """Cuts a commit before each of its writes, and in the middle of it."""
    for step in range(1, 9):
        write(journal, step)
    before = journal.path.read_bytes()
    image = shared_memory / "image"
    outcomes = set()
    for after_writes in range(40):
        image.write_bytes(before)
        victim = CutJournal.open(image, IDENTITY)
        victim.cut = CutView(victim.view, after_writes)
        try:
            victim.commit(state_at(9), 9, entry_of(9), loss_of(9))
        except KilledError:
            finished = False
        else:
            finished = True
        found = Journal.open(image, IDENTITY)
        last = found.state.committed
        assert found.state == state_at(last)
        assert found.entries() == range(last - 3, last + 1)
        assert [found.entry(k) for k in found.entries()] == [entry_of(k) for k in found.entries()]
        assert found.losses() == {step: loss_of(step) for step in range(1, last + 1)}
        # What was cut does not come back with the commit of another step.
        found.commit(state_at(last), last - 1, b"again", None)
        assert Journal.open(image, IDENTITY).entries() == range(last - 3, last + 1)
        outcomes.add((last, finished))
        if finished:
            break
    assert outcomes == {(8, False), (9, False), (9, True)}


class KilledError(Exception):
    pass


class CutJournal(Journal):
    cut = None

    @property
    def view(self):
        return self.cut or super().view


class CutView:
    """Dies in one of the writes to a file, of which the first half is done."""

    def __init__(self, view, writes):
        self._view = view
        self._writes = writes

    def __getitem__(self, where):
        return self._view[where]

    def __setitem__(self, where, data):
        if self._writes < 0:
            raise KilledError
        self._writes -= 1
        if self._writes < 0:
            half = len(data) // 2
            self._view[where.start : where.start + half] = data[:half]
            raise KilledError
        self._view[where] = data


WRITER = """
import sys
from pathlib import Path
from megatron_moevement.runtime.slots.journal import Journal
from tests.runtime.slots.conftest import IDENTITY
from tests.runtime.slots.test_journal import write
from tests.harness.one_schedule import one_schedule
journal = Journal.open(Path(sys.argv[1]), IDENTITY)
step = 0 if journal.state is None else journal.state.committed
print(step, flush=True)
while True:
    step += 1
    write(journal, step)
"""


@pytest.mark.distributed
def test_what_a_killed_writer_leaves_is_old_or_new(journal):
    draw = random.Random(5)
    root = Path(__file__).parents[3]
    last = 0
    for _ in range(15):
        command = [sys.executable, "-c", WRITER, str(journal.path)]
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as writer:
            assert int(writer.stdout.readline()) == last
            time.sleep(draw.random() * 0.03)
            writer.send_signal(signal.SIGKILL)
        found = reopened(journal)
        last = 0 if found.state is None else found.state.committed
        assert found.state == (state_at(last) if last else None)
        assert found.entries() == range(max(1, last - 3), last + 1) or last == 0
        assert [found.entry(k) for k in found.entries()] == [entry_of(k) for k in found.entries()]
        assert found.losses() == {step: loss_of(step) for step in range(1, last + 1)}
        found.close()
    assert last > 100
