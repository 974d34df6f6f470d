# SPDX-License-Identifier: Apache-2.0
"""How much a process records: an interval of steps, one rank for all, bounded bytes."""

import itertools
import json
import os
import threading
import time
from pathlib import Path

import pytest

from megatron_moevement.policy.accounting.account import account_of
from megatron_moevement.policy.accounting.event import DURABLE
from megatron_moevement.runtime.observation import event_file
from megatron_moevement.runtime.observation import events as events_module
from megatron_moevement.runtime.observation.event_file import EventFile, Part, line_of, parts_of
from megatron_moevement.runtime.observation.events import (
    EventLog,
    EventName,
    Recording,
    histories_in,
    kept_documents,
    open_events,
    read_events,
)

EVERY_4 = Recording(interval=4)


def step(events, number, **fields):
    """Emits a step of a second, which began at its number."""
    at = {"began_s": 1000.0 + number, "ended_s": 1001.0 + number}
    events.emit(EventName.ITERATION, number, steps=1, duration_s=0.75, **at, **fields)


def found(directory):
    return [
        (one.event.value, one.iteration, one.fields.get("steps")) for one in read_events(directory)
    ]


def test_one_event_has_the_sums_of_the_steps_of_an_interval(tmp_path):
    with EventLog(tmp_path, 0, 0, EVERY_4) as events:
        for number in range(1, 9):
            step(events, number, loss=10.0 - number, stall_s=0.125, send_s={number % 2: 0.5})
    first, second = read_events(tmp_path)
    assert (first.iteration, second.iteration) == (4, 8)
    assert second.fields == {
        "steps": 4,
        "duration_s": 3.0,
        "began_s": 1005.0,
        "ended_s": 1009.0,
        "stall_s": 0.5,
        "send_s": {"0": 1.0, "1": 1.0},
        "loss": 2.0,
        "losses": [5.0, 4.0, 3.0, 2.0],
    }


def test_what_happens_ends_the_interval_before_it_and_so_does_the_end(tmp_path):
    with EventLog(tmp_path, 0, 0, EVERY_4) as events:
        step(events, 1)
        step(events, 2)
        events.emit(EventName.PHASE, 2, phase="paused")
        step(events, 3)
        step(events, 4)
        step(events, 5)
    assert found(tmp_path) == [
        ("iteration", 2, 2),
        ("phase", 2, None),
        ("iteration", 4, 2),
        ("iteration", 5, 1),
    ]


def test_another_thread_does_not_end_the_interval_of_the_one_that_trains(tmp_path):
    with EventLog(tmp_path, 0, 0, EVERY_4) as events:
        step(events, 1)
        other = threading.Thread(target=events.emit, args=(EventName.SLOT_DAMAGED, 1))
        other.start()
        other.join()
        step(events, 2)
    assert [one[1:] for one in found(tmp_path) if one[0] == "iteration"] == [(2, 2)]


def test_one_rank_records_what_all_share(tmp_path):
    for rank in range(3):
        with EventLog(tmp_path, rank, 0) as events:
            events.emit(EventName.WINDOW_PERSISTED, 4, start=0)
            events.emit(EventName.POPULARITY, 4)
            events.emit(EventName.PROTECTION, 4)
            events.emit(EventName.SCHEDULE, 4)
            events.emit(EventName.WINDOW_CHOSEN, 4)
            events.emit(EventName.PLAN, 4)
    ranks = [(one.event.value, one.logical_rank) for one in read_events(tmp_path)]
    assert sorted(ranks) == [
        *(("plan", 0), ("plan", 1), ("plan", 2), ("popularity", 0), ("protection", 0)),
        *(("schedule", 0), ("schedule", 1), ("schedule", 2)),
        *(("window_chosen", 0), ("window_persisted", 0)),
    ]


class SlowFile:
    """Lets the thread that writes wait, as on a file system that does not answer."""

    LONGEST_S = 10

    def __init__(self, monkeypatch):
        self.may_go = threading.Event()
        write = os.write

        def slow(descriptor, data):
            if threading.current_thread() is not threading.main_thread():
                self.may_go.wait(self.LONGEST_S)
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", slow)


def test_a_slow_folder_makes_intervals_longer_and_no_step_is_lost(tmp_path, monkeypatch):
    slow = SlowFile(monkeypatch)
    with EventLog(tmp_path, 0, 0, Recording()) as events:
        for number in range(1, 3001):
            step(events, number)
        slow.may_go.set()
    steps = [one[1:] for one in found(tmp_path)]
    assert sum(number for _, number in steps) == 3000
    assert steps[-1][0] == 3000
    assert steps[-1][1] > 1000 > len(steps) - 100


def test_what_happens_while_the_folder_is_blocked_holds_up_no_step(tmp_path, monkeypatch):
    slow = SlowFile(monkeypatch)
    names = [name for name in EventName if name not in DURABLE]
    with EventLog(tmp_path, 0, 0, Recording()) as events:
        began_s = time.monotonic()
        for number, name in enumerate(names, 1):
            events.emit(name, number, steps=1)
        took_s = time.monotonic() - began_s
        assert not slow.may_go.is_set()
        slow.may_go.set()
    assert took_s < SlowFile.LONGEST_S / 2
    assert [one[:2] for one in found(tmp_path)] == [
        (name.value, number) for number, name in enumerate(names, 1)
    ]


def test_what_must_be_on_the_disk_waits_for_it_but_not_for_ever(tmp_path, monkeypatch):
    slow = SlowFile(monkeypatch)
    monkeypatch.setattr(event_file, "PATIENCE_S", 0.5)
    with EventLog(tmp_path, 0, 0, Recording()) as events:
        for name in DURABLE:
            began_s = time.monotonic()
            events.emit(name, 1)
            assert 0.5 <= time.monotonic() - began_s < SlowFile.LONGEST_S / 2
            assert found(tmp_path) == []
        slow.may_go.set()
        events.emit(EventName.PHASE, 2)
        events.emit(EventName.FAULT_DETECTED, 3)
        assert [one[0] for one in found(tmp_path)] == [
            *(name.value for name in DURABLE),
            *("phase", "fault_detected"),
        ]


def test_a_folder_that_does_not_answer_holds_up_no_end_and_no_next_generation(
    tmp_path, monkeypatch, caplog
):
    slow = SlowFile(monkeypatch)
    monkeypatch.setattr(event_file, "PATIENCE_S", 0.5)
    began_s = time.monotonic()
    with EventLog(tmp_path, 0, 0, Recording()) as events:
        events.emit(EventName.PHASE, 1)
    assert not events.is_open
    assert "the folder does not answer" in caplog.text
    with open_events(str(tmp_path), 0, 1, Recording()) as events:
        events.emit(EventName.PROCESS_START, 2)
    assert time.monotonic() - began_s < SlowFile.LONGEST_S / 2
    slow.may_go.set()
    while event_file.waits_for(tmp_path):
        time.sleep(0.01)
    with open_events(str(tmp_path), 0, 2, Recording()) as events:
        events.emit(EventName.PROCESS_START, 3)
    assert [one[:2] for one in found(tmp_path)] == [("phase", 1), ("process_start", 3)]
    opened = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_a_document_waits_for_the_folder_but_not_for_ever(tmp_path, monkeypatch, caplog):
    may_go, open_file = threading.Event(), os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, *rest: (
            ".partial" in str(path) and may_go.wait(SlowFile.LONGEST_S),
            open_file(path, *rest),
        )[1],
    )
    monkeypatch.setattr(events_module, "PATIENCE_S", 0.5)
    with EventLog(tmp_path, 0, 0, Recording()) as events:
        began_s = time.monotonic()
        events.keep("facts", "{}")
        assert 0.5 <= time.monotonic() - began_s < SlowFile.LONGEST_S / 2
        assert "no answer" in caplog.text
        assert events.is_open
        may_go.set()
        while not kept_documents(tmp_path, "facts"):
            time.sleep(0.01)


def test_what_else_recurs_is_left_out_where_too_much_waits_and_a_line_says_so(
    tmp_path, monkeypatch, caplog
):
    slow = SlowFile(monkeypatch)
    with EventLog(tmp_path, 0, 0, Recording()) as events:
        for number in range(2000):
            events.emit(EventName.WINDOW_PERSISTED, number)
        slow.may_go.set()
    kept = len(found(tmp_path))
    assert 1024 <= kept < 1100
    assert f"{2000 - kept} events were left out" in caplog.text


def record(directory, most_bytes, steps):
    """Records steps with pauses in between; returns their account."""
    with EventLog(directory, 0, 0, Recording(most_bytes=most_bytes)) as events:
        events.emit(EventName.PROCESS_START, 0)
        for number in range(1, steps + 1):
            step(events, number, loss=float(number), stall_s=0.25, text="x" * 100)
            events.emit(EventName.WINDOW_PERSISTED, number)
            if number % 100 == 0:
                events.emit(EventName.PHASE, number, phase="paused")
                events.emit(EventName.PHASE, number, phase="training")
                while not events._file._lines.empty():
                    time.sleep(0.001)
    return account_of(histories_in(directory))


def test_old_events_become_sums_and_the_account_stays_the_same(tmp_path, monkeypatch):
    clock = itertools.count(2_000_000)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    whole = record(tmp_path / "whole", 1 << 26, 2000)
    clock = itertools.count(2_000_000)
    small = record(tmp_path / "small", 1 << 16, 2000)
    assert len(list((tmp_path / "whole").iterdir())) == 1
    assert small.parts_us == whole.parts_us
    assert (small.steps, small.wall_us) == (whole.steps, whole.wall_us) == (2000, whole.wall_us)
    sizes = [path.stat().st_size for path in (tmp_path / "small").iterdir()]
    assert len(sizes) == 5
    assert (
        sum(sizes) < 1 << 17 < (sum(one.stat().st_size for one in (tmp_path / "whole").iterdir()))
    )
    steps = [one for one in read_events(tmp_path / "small") if one.event is EventName.ITERATION]
    assert steps[0].fields["steps"] == 100
    assert steps[-1].fields["steps"] == 1


def test_a_leftover_of_a_kill_while_parts_are_joined_counts_once(tmp_path):
    record(tmp_path, 1 << 16, 2000)
    before = found(tmp_path)
    (path,) = (one for one in tmp_path.glob("*.jsonl") if ".part" not in one.name)
    joined, *whole = parts_of(path)
    assert joined.first == 0 < joined.last
    assert not any(part.is_compact for part in whole)
    for part in (Part(path, 0, joined.last - 1), Part(path, joined.last, None)):
        part.path.write_bytes(joined.path.read_bytes())
    assert found(tmp_path) == before


def test_a_line_of_a_part_is_read_as_it_was(tmp_path):
    with EventLog(tmp_path, 3, 2) as events:
        step(events, 7, loss=0.1)
    (record,) = read_events(tmp_path)
    (path,) = tmp_path.iterdir()
    assert json.loads(line_of(record)) == json.loads(path.read_text())


def test_files_of_hosts_with_dots_are_told_apart(tmp_path):
    path = tmp_path / "node.part1-7-00ff.jsonl"
    Part(path, 0, None).path.touch()
    (tmp_path / "node.part1-7-00ff.jsonl").touch()
    assert list(histories_in(tmp_path)) == [str(path)]
    assert [part.first for part in parts_of(path)] == [0]


def test_a_part_that_can_not_be_joined_ends_the_recording_with_a_line(tmp_path, caplog):
    def read(path: Path):
        raise ValueError(f"{path.name} is damaged")

    file = EventFile(tmp_path, 1 << 10, read)
    file.start()
    for _ in range(100):
        file.write_later(b"x" * 400 + b"\n")
        file.write(b"y\n")
    assert not file.is_open
    file.close()
    assert "is damaged; no more events are recorded" in caplog.text


@pytest.mark.parametrize("interval", [1, 3])
def test_steps_that_are_written_again_after_an_interrupt_count_once(tmp_path, interval):
    with EventLog(tmp_path, 0, 0, Recording(interval)) as events:
        step(events, 1)
        step(events, 2)
        steps = events._steps or (threading.get_ident(), 2, {"steps": 1})
        if interval > 1:
            events._end_steps()
            events._steps = steps
    account = account_of(histories_in(tmp_path))
    assert account.steps == 2
    assert sum(one for one in account.parts_us.values()) == account.wall_us
