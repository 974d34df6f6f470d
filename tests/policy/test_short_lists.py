# SPDX-License-Identifier: Apache-2.0
"""Short lists find that all are there when the last one comes, and each has few entries."""

import pytest

from megatron_moevement.policy.watching.short_lists import (
    ENTRIES,
    by_list,
    entries_above,
    first_look_s,
    list_of,
    look_interval_s,
    slice_s,
    turn,
)

SIZES = [1, ENTRIES, ENTRIES + 1, 1024, 1025, 16_384, ENTRIES**3 + 1]


@pytest.mark.parametrize("processes", SIZES)
def test_each_list_has_few_entries_and_all_lead_to_the_same_top(processes):
    lists = by_list(range(processes))
    assert all(0 < len(each) <= ENTRIES for each in lists.values())
    assert sorted(process for each in lists.values() for process in each) == list(range(processes))
    tops = set()
    for number in lists if processes <= 1025 else (0, len(lists) - 1):
        entries = entries_above(number, lists)
        assert all(entry.number in entry.wanted for entry in entries)
        assert all(len(entry.wanted) <= ENTRIES for entry in entries)
        assert [entry.level for entry in entries] == list(range(1, len(entries) + 1))
        tops.add(entries[-1][:2] if entries else None)
    assert len(tops) == 1


@pytest.mark.parametrize("processes", [100, 1025, 2100])
def test_the_last_list_that_is_whole_finds_the_top_whole_and_none_before(processes):
    lists = by_list(range(processes))
    noted = {}

    def note_whole(number):
        for entry in entries_above(number, lists):
            here = noted.setdefault((entry.level, entry.place), set())
            here.add(entry.number)
            if not here >= entry.wanted:
                return False
        return True

    *others, last = sorted(lists, key=lambda number: -number)
    assert not any(note_whole(number) for number in others)
    assert note_whole(last)


def test_lists_without_processes_are_not_waited_for():
    lists = by_list([0, 1, 5 * ENTRIES])
    assert lists == {0: {0, 1}, 5: {5 * ENTRIES}}
    (entry,) = entries_above(list_of(5 * ENTRIES), lists)
    assert entry.wanted == {0, 5}


def test_few_processes_look_as_often_as_they_may_and_many_share_the_looks():
    assert look_interval_s(0.05, 32, free=32) == 0.05
    assert look_interval_s(0.05, 1024, free=32) == pytest.approx(1.6)
    assert slice_s(0.25, 1024) == 0.25
    assert slice_s(0.25, 16_384) == 4.0


def test_processes_of_a_list_take_turns():
    first = [first_look_s(1.6, process) for process in range(ENTRIES)]
    assert first == pytest.approx([0.05 * (process + 1) for process in range(ENTRIES)])


@pytest.mark.parametrize("processes", [1024, 2048, 1536])
def test_who_look_after_a_list_that_is_not_theirs_take_turns(processes):
    lists = len(by_list(range(processes)))
    for number in range(lists):
        watchers = [one for one in range(processes) if turn(one, 1, lists) == number]
        looks = {first_look_s(1.6, one) for one in watchers}
        assert len(looks) == len(watchers) == ENTRIES


def test_each_list_has_as_many_who_look_after_it_whichever_processes_wait():
    lists = len(by_list(range(1024)))
    for looks in range(3):
        seen = [turn(process, looks, lists) for process in range(1024)]
        assert all(seen.count(number) == ENTRIES for number in range(lists))
    alone = {turn(700, looks, lists) for looks in range(lists)}
    assert alone == set(range(lists))
