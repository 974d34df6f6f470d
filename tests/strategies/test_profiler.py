# SPDX-License-Identifier: Apache-2.0
"""The profiler counts what threads spent, and tells bandwidths without what came before."""

from datetime import timedelta
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.watching.measurements import (
    NOT_MEASURED,
    CpuTimes,
    Measured,
    Work,
)
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry
from megatron_moevement.runtime.coordination.progress import Spent
from megatron_moevement.runtime.observation.cpu_times import CpuShare
from megatron_moevement.strategies.moevement.capture.profiler import Profiler
from megatron_moevement.strategies.moevement.capture.window_capture import (
    SlotContents,
    WindowCapture,
)

NONE = timedelta()


class Copies:
    """What a profiler asks of a replicator."""

    def __init__(self):
        self.sent = {1: (), 2: ()}
        self.spent_s = {}
        self.is_in_trouble = False

    def acknowledged(self, process, size_bytes, spent_s):
        self.sent[process] = (*self.sent[process], Work(size_bytes, spent_s))
        self.spent_s = {**self.spent_s, process: self.spent_s.get(process, 0.0) + spent_s}


class Rank:
    """A profiler with a clock that a test moves."""

    def __init__(self):
        self.now_s = self.log_s = 0.0
        self.copies = Copies()
        self.cpu_s = {1: 0.0}
        self.cpu_readings = 0
        self.profiler = Profiler(lambda: self.now_s)
        self.measured = lambda **begins: self.profiler.measured(self.copies, **begins)

    def cpu_times(self):
        """Returns those of a process that shares two busy cores with another one."""
        self.cpu_readings += 1
        return CpuTimes(dict(self.cpu_s), self.now_s, 0.0, 2 * self.now_s)

    def step(self, *, passes_s=1.0, copies=NONE, room=NONE, log=NONE):
        self.now_s += passes_s + (copies + room + log).total_seconds()
        self.profiler.waits = (copies, room)
        self.profiler.step_ends(log)


def warm(rank):
    rank.step()
    assert rank.measured() == NOT_MEASURED
    return rank


def choosing():
    """Returns a rank of a job that chooses its W."""
    rank = Rank()
    rank.profiler.cpu_share = CpuShare(lambda: rank.now_s, rank.cpu_times)
    return warm(rank)


def test_the_first_steps_of_a_generation_are_not_measured():
    warm(Rank())


def test_a_rank_tells_its_slowest_holder_and_its_stalls():
    rank = warm(Rank())
    for _ in range(4):
        rank.step(room=timedelta(seconds=0.25))
        rank.profiler.captured(1000, 1.5, 0.5)
        rank.copies.acknowledged(1, 1000, 1.0)
        rank.copies.acknowledged(2, 1000, 4.0)
    assert Measured.worst(rank.measured()) == Measured(500.0, 250.0, 1.0, 0.25)


def test_what_was_told_is_not_told_again():
    rank = warm(Rank())
    for rate, stall_s in ((100, 0.5), (4000, 0.0)):
        for _ in range(4):
            rank.step(copies=timedelta(seconds=stall_s))
            rank.profiler.captured(rate, 0.5, 0.5)
        assert Measured.worst(rank.measured()) == Measured(rate, None, 1.0, stall_s)


def test_one_long_step_does_not_make_iterations_long():
    rank = warm(Rank())
    for passes_s in (1.0, 60.0, 1.0, 1.0):
        rank.step(passes_s=passes_s)
    assert Measured.worst(rank.measured()).iteration_s == 1.0


def test_nothing_is_told_while_transfers_fail():
    rank = warm(Rank())
    for failing in (True, False):
        rank.step()
        if failing:
            rank.profiler.is_in_trouble()
        assert (rank.measured() == NOT_MEASURED) is failing
    rank.step()
    rank.copies.is_in_trouble = True
    assert rank.measured() == NOT_MEASURED


times = st.integers(0, 2**20).map(lambda value: value / 1024)


@given(st.lists(st.tuples(times, times, times, times), min_size=1, max_size=8))
def test_every_second_is_spent_in_one_step(steps):
    rank, found = Rank(), []
    for copy_s, hash_s, send_s, log_s in steps:
        rank.profiler.captured(10, copy_s, hash_s)
        rank.copies.acknowledged(1, 10, send_s)
        rank.log_s += log_s
        found.append(rank.profiler.spent(rank.copies, rank.log_s))
    assert found == [
        Spent(copy_s=copy, hash_s=hashed, send_s={1: sent} if sent else {}, log_s=log)
        for copy, hashed, sent, log in steps
    ]


def measured_with(rank, steps, cpu_s, *, captures=True, begins=False):
    """Returns what is measured of steps of a second in which a thread takes CPU time."""
    for _ in range(steps):
        rank.step()
        rank.cpu_s[1] += cpu_s
        if captures:
            rank.profiler.captured(1000, 0.5, 0.5)
    measured = Measured.worst(rank.measured(begins=begins))
    return None if measured is None else measured.contention_s


def test_what_threads_take_from_training_is_measured_since_the_last_time():
    rank = choosing()
    assert measured_with(rank, 4, 0.5) == 0.5
    assert measured_with(rank, 4, 0.25) == 0.25
    assert measured_with(rank, 4, 0.0, captures=False) == 0.25  # no reading since then
    assert measured_with(rank, 4, 0.125) == (0.125 * 4) / 8


def test_what_threads_took_under_the_former_schedule_counts_no_longer():
    rank = choosing()
    assert measured_with(rank, 4, 0.5) == 0.5
    assert measured_with(rank, 4, 0.5, begins=True) is None
    assert measured_with(rank, 4, 0.5, captures=False) is None  # not known yet
    assert measured_with(rank, 1, 0.5) is None  # the first reading
    assert measured_with(rank, 4, 0.125) == 0.125
    readings = rank.cpu_readings
    rank.measured(begins=True)
    rank.step(passes_s=0.25)
    rank.profiler.captured(1000, 0.5, 0.5)  # at once, so that little is left out
    assert rank.cpu_readings == readings + 1


def test_cpu_times_are_read_once_a_second_at_most_and_where_w_is_chosen_alone():
    for rank, readings in ((choosing(), 4), (warm(Rank()), 0)):
        for _ in range(16):
            rank.step(passes_s=0.25)
            rank.profiler.captured(1000, 0.5, 0.5)
        assert rank.cpu_readings == readings
        assert Measured.worst(rank.measured()).contention_s == 0


def test_a_schedule_that_begins_is_not_measured_by_the_one_before():
    timetable = Timetable((TimetableEntry(0, 0, 4, "first"), TimetableEntry(1, 8, 2, "second")))
    contents = SlotContents(timetable, {}, rollbacks=0)
    windows = WindowCapture(Mock(), Mock(), contents, Mock())
    windows.profiler.cpu_share = share = Mock(taken=lambda: None)
    begun = []
    for step in range(1, 13):
        assert windows.measured(step) == NOT_MEASURED
        begun += [step] * share.begin.call_count
        share.begin.reset_mock()
    assert begun == [8]
