# SPDX-License-Identifier: Apache-2.0
"""Which windows the writer of tiers hears of, step by step, and what a tier says of its own."""

import contextlib
import types

import pytest

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.tiers.tier import TierName
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable, TimetableEntry
from megatron_moevement.runtime.slots.journal import Journal, JournalShape
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.origin_file import (
    Origin,
    forget_origin,
    lacking_in,
    write_origin,
)
from megatron_moevement.strategies.moevement.tiers.tiers import Tiers

WRITERS = "a" * 16
RANK = LogicalRank(pp=1)
TIMETABLE = Timetable((TimetableEntry(0, 2, 3, "d"),))
WINDOWS = [Window(start, 3) for start in range(2, 20, 3)]


class Heard:
    """Stands where the writer is, and keeps what it would be to write."""

    def __init__(self):
        self.due = []
        self.passed = []
        self.captured_window = None

    def captured(self, slots):
        self.captured_window = slots.window

    def passed_over(self, name):
        self.passed.append(name.committed)

    def offer(self, due):
        self.due.append(due)


class History:
    """A journal to which steps are committed, and tiers that look at it."""

    def __init__(self, folder, interval):
        shape = JournalShape(8, 50, 30, schedule_bytes=20)
        self.journal = Journal.create(folder / "journal", StoreIdentity("run", "0123"), shape)
        self.heard = Heard()
        self.folder = folder
        self._memory = types.SimpleNamespace(journal=self.journal, own_ring=None)
        self._tiers = Tiers(None, interval, WRITERS, None, self.heard)
        self._persisted = None

    def commit(self, step, persisted):
        state = JournalState(4, TIMETABLE, step, persisted, RANK)
        self.journal.commit(state, step, b"{}", 1.0 * step)
        self._tiers.at_commit(self._memory, self._persisted)
        self._persisted = persisted


def persisted_at(step, lag):
    whole = [window for window in WINDOWS if window.last + 1 + lag <= step]
    return whole[-1] if whole else None


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_tier_leads_to_the_step_after_its_window_however_late_that_is_persisted(
    shared_memory, interval, lag
):
    history = History(shared_memory, interval)
    with contextlib.closing(history.journal):
        for step in range(3, 20):
            persisted = persisted_at(step, lag)
            history.commit(step, persisted)
            following = WINDOWS[0 if persisted is None else WINDOWS.index(persisted) + 1]
            is_due = WINDOWS.index(following) % interval == 0
            assert (history.heard.captured_window == following) == is_due
        assert [due.slots.window for due in history.heard.due] == [
            window for window in WINDOWS[::interval] if window.last + 1 + lag < 20
        ]
        for due in history.heard.due:
            reached = due.slots.window.last + 1
            assert due.name == TierName(4, reached, WRITERS)
            assert due.told.state.committed == reached == max(due.told.entries)
            assert due.told.state.persisted == due.slots.window
            losses = b"".join(due.losses())
            assert losses == history.journal.loss_bytes(range(reached + 1))


def test_memory_is_its_own_once_a_window_that_is_all_its_own_is_persisted(tmp_path):
    folder = tmp_path / "run" / "process-3"
    folder.mkdir(parents=True)
    origin = Origin(8, ("rank 0 has another GPU than at first",))
    write_origin(folder, origin)
    forget_origin(folder, 5)
    assert lacking_in(folder.parent) == origin.lacking
    forget_origin(folder, 8)
    assert lacking_in(folder.parent) == ()
    forget_origin(folder, 11)


@pytest.mark.parametrize(("interval", "passed"), [(1, [8, 11]), (2, [11])])
def test_windows_that_are_persisted_together_with_a_later_one_are_reported(
    shared_memory, interval, passed
):
    history = History(shared_memory, interval)
    with contextlib.closing(history.journal):
        history.commit(5, WINDOWS[0])
        history.commit(14, WINDOWS[3])
        assert history.heard.passed == passed
