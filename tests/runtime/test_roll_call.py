# SPDX-License-Identifier: Apache-2.0
"""The roll is called until every process that was called is watched; all find the same."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_moevement.runtime.coordination import roll_call
from megatron_moevement.runtime.coordination.roll_call import (
    LostAtStartError,
    RollCall,
    _Notes,
    newest_round,
    note_gone,
    prefix_of,
    promise_notes,
)
from megatron_moevement.settings.secret import Secret
from tests.harness.counting_store import CountingStore, SharedKeys

SECRET = Secret(b"s" * 64)
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.3)


@pytest.fixture
def store():
    return dist.HashStore()


def in_threads(*calls):
    """Calls functions at the same time; returns what they returned or raised."""
    found = [None] * len(calls)

    def call(number):
        try:
            found[number] = calls[number]()
        except LostAtStartError as error:
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def watch(store, roll, process):
    """Notes what the monitor of a process notes."""
    _Notes(store, SECRET, "0").add(f"moevement/roll{roll}/watched", process)


def agree(store, key, document):
    """Has processes agree on something."""
    assert _Notes(store, SECRET, "0").agreed(f"moevement/roll0/{key}", document) == document


def member(store, process, processes, patience=LONG, then=lambda roll: None):
    """Returns a process that calls the roll, and then does something."""

    def call():
        roll = RollCall(process, processes, secret=SECRET, attempt="0", patience=patience)
        called = roll.call(store)
        return called, then(roll)

    return call


def test_everybody_who_is_there_is_called(store):
    found = in_threads(*(member(store, process, 3) for process in range(3)))
    assert found == [((0, 1, 2), None)] * 3


def test_who_is_gone_is_not_waited_for(store):
    note_gone(store, 1, SECRET)
    found = in_threads(member(store, 0, 3), member(store, 2, 3))
    assert found == [((0, 2), None)] * 2


def test_who_does_not_come_in_time_has_come_too_late(store):
    found = in_threads(*(member(store, process, 3, SHORT) for process in (0, 2)))
    assert found == [((0, 2), None)] * 2
    assert member(store, 1, 3)() == ((0, 2), None)


def test_a_round_holds_once_all_are_watched(store):
    for process in range(2):
        watch(store, 0, process)
    found = in_threads(
        *(member(store, process, 2, then=lambda roll: roll.await_hold(store)) for process in (0, 1))
    )
    assert found == [((0, 1), None)] * 2


def hold(store):
    return lambda roll: roll.await_hold(store)


def test_who_is_lost_before_it_is_watched_ends_the_round_for_all(store):
    def die(roll):
        note_gone(store, 1, SECRET)

    watch(store, 0, 0)
    calls = [member(store, process, 3, then=hold(store)) for process in (0, 2)]
    found = in_threads(*calls, member(store, 1, 3, then=die))
    assert [str(error) for error in found[:2]] == ["process 1 was lost at the start"] * 2


def test_who_is_lost_once_it_is_watched_is_nobody_elses_concern(store):
    for process in range(2):
        watch(store, 0, process)
    note_gone(store, 1, SECRET)
    agree(store, "called", [[0, 1]])
    assert member(store, 0, 2, then=hold(store))() == ((0, 1), None)


def test_what_one_process_found_all_find(store):
    """One saw all watched; another one, which looks later, sees that a process is gone."""
    agree(store, "called", [[0, 1]])
    agree(store, "outcome", "again")
    watch(store, 0, 0)
    watch(store, 0, 1)
    with pytest.raises(LostAtStartError):
        member(store, 0, 2, then=hold(store))()


def test_who_is_never_watched_ends_the_round_in_time(store):
    watch(store, 0, 0)
    calls = [member(store, process, 2, SHORT, hold(store)) for process in (0, 1)]
    assert all(isinstance(error, LostAtStartError) for error in in_threads(*calls))


def test_the_next_round_is_called_without_the_lost_one(store):
    def again(roll):
        with pytest.raises(LostAtStartError):
            roll.await_hold(store)
        return roll.call(store), roll.number

    calls = [member(store, process, 3, then=again) for process in (0, 2)]
    found = in_threads(*calls, member(store, 1, 3, then=lambda roll: note_gone(store, 1, SECRET)))
    assert found[:2] == [((0, 1, 2), ((0, 2), 1))] * 2
    assert newest_round(store) == 1


def test_other_threads_are_not_bothered(store):
    roll = RollCall(0, 1, secret=SECRET, attempt="0", patience=LONG)
    roll.call(store)
    note_gone(store, 0, SECRET)
    assert in_threads(lambda: roll.check(store)) == [None]
    with pytest.raises(LostAtStartError):
        roll.check(store)


def test_what_nobody_of_the_job_wrote_does_not_count(store):
    keys = dist.PrefixStore(prefix_of("0"), store)
    note_gone(store, 0, Secret(b"x" * 64))
    keys.set("moevement/roll0/called", "[[1, 1]]")
    keys.append("moevement/roll0/here", "\n2\n")
    found = in_threads(*(member(store, process, 2) for process in range(2)))
    assert found == [((0, 1), None)] * 2


def test_a_launcher_says_how_processes_ended(store, monkeypatch):
    monkeypatch.setattr(roll_call, "_END_PATIENCE_S", LONG.total_seconds())
    roll = RollCall(0, 3, secret=SECRET, attempt="0", patience=LONG)
    assert roll.ends(store, [1]) == {}  # nobody has promised anything
    promise_notes(store, SECRET)
    later = threading.Timer(0.2, note_gone, [store, 1, SECRET], {"end": "was killed by SIGKILL"})
    later.start()
    assert roll.ends(store, [1]) == {1: "was killed by SIGKILL"}
    later.join()
    note_gone(store, 2, Secret(b"x" * 64), end="a stranger's words")
    assert roll.ends(store, [1]) == {1: "was killed by SIGKILL"}


def test_all_wait_at_once_for_what_a_launcher_has_not_noted_yet():
    keys = SharedKeys()
    promise_notes(CountingStore(keys), SECRET)
    stores = [CountingStore(keys) for _ in range(8)]
    rolls = [RollCall(one, 8192, secret=SECRET, attempt="0", patience=LONG) for one in range(8)]
    later = threading.Timer(
        0.2, note_gone, [CountingStore(keys), 9, SECRET], {"end": "was killed by SIGKILL"}
    )
    later.start()
    calls = [
        lambda roll=roll, store=store: roll.ends(store, [9])
        for roll, store in zip(rolls, stores, strict=True)
    ]
    assert in_threads(*calls) == [{9: "was killed by SIGKILL"}] * 8
    later.join()
    assert max(store.load.requests["wait"] for store in stores) == 1
    assert max(store.load.requests.total() for store in stores) <= 8


def test_who_waits_for_ends_waits_in_slices_for_one_at_a_time(monkeypatch):
    monkeypatch.setattr(roll_call, "_END_PATIENCE_S", 0.6)
    waits = []

    def wait(store, keys, timeout):
        waits.append((keys[0].rpartition("/")[2], len(keys), timeout.total_seconds()))
        CountingStore.wait(store, keys, timeout)

    store = CountingStore(SharedKeys())
    monkeypatch.setattr(store, "wait", lambda keys, timeout: wait(store, keys, timeout))
    promise_notes(store, SECRET)
    note_gone(store, 1, SECRET, end="was killed by SIGKILL")
    roll = RollCall(0, 8, secret=SECRET, attempt="0", patience=LONG)
    later = threading.Timer(0.3, note_gone, [store, 2, SECRET], {"end": "left with code 1"})
    later.start()
    assert set(roll.ends(store, [1, 2, 3])) == {1, 2}
    later.join()
    assert [process for process, _, _ in waits] == ["2", "2", "3", "3"]
    assert {keys for _, keys, _ in waits} == {1}
    assert max(length_s for *_, length_s in waits) <= roll_call._SLICE_S
