# SPDX-License-Identifier: Apache-2.0
"""A roll call of many processes costs each the same, whatever their number, and misses nobody."""

import os
import threading
import time
from datetime import timedelta

import pytest

from megatron_moevement.policy.watching.short_lists import ENTRIES
from megatron_moevement.runtime.coordination import attendance
from megatron_moevement.runtime.coordination.attendance import Looks
from megatron_moevement.runtime.coordination.elected_reader import READING_S
from megatron_moevement.runtime.coordination.roll_call import (
    LostAtStartError,
    RollCall,
    _Notes,
    note_gone,
    prefix_of,
)
from tests.harness.counting_store import CountingStore, SharedKeys
from tests.harness.stepped_roll_call import PATIENCE, SECRET, SteppedRollCall

LONG = timedelta(seconds=600)
LARGEST = 100 * ENTRIES
READ_ONCE = "/called"
LARGEST_CALLED = 120
"""Bytes, sealed, where all are there."""
SIZES = (64, 128)
REQUESTS = 30
"""Of a process that comes, looks twice, and learns who is called."""


class KilledError(Exception):
    """Ends a process in the midst of its requests."""


class Process:
    """One of many: a thread that calls the roll, and its connection."""

    def __init__(self, keys, process, processes, then=lambda roll, store: None, patience=LONG):
        self.store = CountingStore(keys)
        self.called, self.error = None, None
        roll = {"secret": SECRET, "attempt": "0", "patience": patience}
        self.thread = threading.Thread(target=self._run, args=(process, processes, roll, then))
        self.thread.daemon = True
        self.thread.start()

    def _run(self, process, processes, roll, then):
        calling = RollCall(process, processes, **roll)
        self.called = calling.call(self.store)
        try:
            then(calling, self.store)
        except LostAtStartError as error:
            self.error = str(error)

    def join(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.called


def await_requests(process, number):
    """Waits until a process has asked so often."""
    for _ in range(3000):
        if process.store.load.requests.total() >= number:
            return
        time.sleep(0.01)
    raise AssertionError(process.store.load)


def note_watched(roll, store):
    """Does what the monitor of a process does, in the process itself."""
    roll._caller = (0, threading.get_ident())
    roll.note_watched(store)
    roll._caller = (os.getpid(), threading.get_ident())


def hold(roll, store):
    note_watched(roll, store)
    roll.await_hold(store)


@pytest.mark.parametrize("processes", SIZES)
def test_a_process_reads_short_lists_and_who_is_called_once(processes):
    keys = SharedKeys()
    waiting = [Process(keys, process, processes, hold) for process in range(1, processes)]
    for process in waiting:
        await_requests(process, 24)
    last = Process(keys, 0, processes, hold)
    everybody = tuple(range(processes))
    assert all(process.join() == everybody for process in (*waiting, last))
    for load in (process.store.load for process in (*waiting, last)):
        assert load.largest(besides=[READ_ONCE]) <= LARGEST
        assert [len(sizes) for key, sizes in load.read.items() if key.endswith(READ_ONCE)] in (
            [1],
            [],  # it proposed it
        )


def test_one_process_reads_all_lists_though_all_others_look_meanwhile():
    of_all = {}
    for processes in (256, 1024):
        met = SteppedRollCall(processes)
        met.meet()
        assert all(member.called == list(range(processes)) for member in met.members)
        assert met.readers() == [processes - 1]
        *others, first = met.requests()
        assert max(others) <= REQUESTS
        assert first <= REQUESTS + 3 * processes / ENTRIES
        of_all[processes] = sum(met.requests())
    assert of_all[1024] <= 4.2 * of_all[256]


def test_what_all_read_of_who_is_called_is_short_however_many_are():
    read_bytes = {}
    for processes in (256, 1024):
        met = SteppedRollCall(processes)
        met.meet()
        loads = [member.store.load for member in met.members]
        sizes = [
            size
            for load in loads
            for key in load.read
            if key.endswith(READ_ONCE)
            for size in load.read[key]
        ]
        assert max(sizes) <= LARGEST_CALLED
        read_bytes[processes] = sum(sizes)
    assert read_bytes[1024] <= 4.2 * read_bytes[256]


@pytest.mark.parametrize("processes", SIZES)
def test_all_others_of_a_simulated_roll_call_look_while_one_reads(processes, monkeypatch):
    met, elected = SteppedRollCall(processes), []
    look = met.look

    def look_and_note():
        elected.append(any(key.endswith("/here_reader0") for key in met.keys.values))
        look()

    monkeypatch.setattr(met, "look", look_and_note)
    met.meet()
    assert elected == [True]


@pytest.mark.parametrize("is_noted", [True, False])
def test_one_process_reads_in_the_place_of_a_reader_that_is_lost(is_noted):
    met, lost = SteppedRollCall(8 * ENTRIES), 8 * ENTRIES - 1

    def die():
        raise KilledError

    def look_meanwhile():
        for member in met.waiting[1:]:
            member.look()

    met.last.store.before[met.in_the_middle] = die
    with met.clock.ticking():
        met.come()
        with pytest.raises(KilledError):
            met.last.come()
        met.look(after_s=1.0)
        assert [member.called for member in met.waiting] == [None] * lost
        if is_noted:
            note_gone(met.last.store, lost, SECRET)
        met.waiting[0].store.before[met.in_the_middle] = look_meanwhile
        met.look(after_s=1.0 if is_noted else READING_S)
        for member in met.waiting:
            member.wake()
    everybody = list(range(lost if is_noted else lost + 1))
    assert all(member.called == everybody for member in met.waiting)
    assert met.readers() == [0]


def test_one_process_reads_all_lists_when_the_time_is_over():
    met = SteppedRollCall(8 * ENTRIES)
    first, *others = met.waiting

    def look_meanwhile():
        for member in others:
            member.look()

    with met.clock.ticking():
        met.come()
        met.clock.now_s += PATIENCE.total_seconds()
        first.store.before[met.in_the_middle] = look_meanwhile
        first.look()
        for member in others:
            member.wake()
    assert all(member.called == list(range(8 * ENTRIES - 1)) for member in met.waiting)
    assert met.readers() == [0]


def test_one_process_reads_who_is_watched_when_the_time_is_over():
    met = SteppedRollCall(8 * ENTRIES)
    first, *others = met.waiting
    lost = met.members.index(met.last)

    def check():
        for member in others:
            member.roll.check(member.store)

    with met.clock.ticking():
        _Notes(first.store, SECRET, "0").agreed("moevement/roll0/called", [[0, lost]])
        for member in met.waiting:
            member.roll.call(member.store)
            note_watched(member.roll, member.store)
        met.clock.now_s += PATIENCE.total_seconds()
        first.store.before[met.in_the_middle.replace("here", "watched")] = check
        for member in met.waiting:
            with pytest.raises(LostAtStartError, match=f"process {lost} was"):
                member.roll.check(member.store)
    assert met.readers("watched") == [0]


def test_who_ends_the_wait_calls_itself_though_a_stranger_has_removed_it():
    met = SteppedRollCall(2 * ENTRIES)
    with met.clock.ticking():
        met.come()
        met.clock.now_s += PATIENCE.total_seconds()
        first = met.waiting[ENTRIES]
        first.store.before["here_reader0"] = lambda: met.keys.remove("here:0.1")
        first.look()
    assert first.called == list(range(ENTRIES + 1))


def looks_in(seconds, processes, monkeypatch):
    """Returns how many looks all processes take in some time."""
    now_s = [0.0]
    monkeypatch.setattr(attendance.time, "monotonic", lambda: now_s[0])
    numbers = range(-(-processes // ENTRIES))
    looks = [
        Looks(process, numbers, 0.05, processes=processes, free=32) for process in range(processes)
    ]
    count = 0
    for tick in range(int(seconds / 0.01)):
        now_s[0] = tick * 0.01 + 1e-6
        count += sum(bool(one.due()) for one in looks)
    return count


def test_more_processes_take_no_more_looks_together(monkeypatch):
    few = looks_in(8.0, 32, monkeypatch)
    many = looks_in(8.0, 512, monkeypatch)
    assert few <= 32 * 8.0 / 0.05 + 32
    assert many <= few + 2 * 512  # the first two come sooner


def test_a_list_whose_processes_are_all_gone_is_looked_after_by_others():
    keys, processes = SharedKeys(), 3 * ENTRIES
    launcher = CountingStore(keys)
    gone = range(ENTRIES, 2 * ENTRIES)
    here = [process for process in range(processes) if process not in gone]
    waiting = [Process(keys, process, processes) for process in here]
    for process in waiting:
        await_requests(process, 12)
    for process in gone:
        note_gone(launcher, process, SECRET)
    assert all(process.join() == tuple(here) for process in waiting)


def test_all_find_who_was_lost_before_it_was_watched():
    keys, processes = SharedKeys(), 2 * ENTRIES + 1
    lost = processes - 1

    def die(roll, store):
        note_gone(store, lost, SECRET)

    dying = Process(keys, lost, processes, die)
    others = [Process(keys, process, processes, hold) for process in range(lost)]
    dying.join()
    for process in others:
        process.join()
        assert process.error == f"process {lost} was lost at the start"


def test_who_does_not_come_in_time_is_not_called_though_nobody_notes_its_end():
    keys, processes = SharedKeys(), 2 * ENTRIES
    missing = ENTRIES + 1
    here = [process for process in range(processes) if process != missing]
    waiting = [Process(keys, process, processes, patience=timedelta(seconds=3)) for process in here]
    assert all(process.join() == tuple(here) for process in waiting)


@pytest.mark.parametrize("what", ["here", "here:0.1", "here:1.0", ""])
def test_what_a_stranger_removes_is_noted_again(what):
    keys, processes = SharedKeys(), 2 * ENTRIES
    waiting = [Process(keys, process, processes) for process in range(1, processes)]
    for process in waiting:
        await_requests(process, 18)
    keys.remove(what)
    last = Process(keys, 0, processes)
    everybody = tuple(range(processes))
    assert all(process.join() == everybody for process in (*waiting, last))


def test_what_a_stranger_adds_does_not_count():
    keys, processes = SharedKeys(), 2 * ENTRIES
    stranger = CountingStore(keys)
    stranger.set(f"{prefix_of('0')}/moevement/roll0/called", "[[1, 1]]")
    for name in ("here:0.1", "here:1.0", "here"):
        stranger.append(f"{prefix_of('0')}/moevement/roll0/{name}", "\n1\n")
    waiting = [Process(keys, process, processes) for process in range(1, processes)]
    for process in waiting:
        await_requests(process, 18)
    assert all(process.thread.is_alive() for process in waiting)
    last = Process(keys, 0, processes)
    everybody = tuple(range(processes))
    assert all(process.join() == everybody for process in (*waiting, last))
