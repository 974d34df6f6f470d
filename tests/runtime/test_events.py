# SPDX-License-Identifier: Apache-2.0
"""Events of all processes are whole lines, whoever writes, dies or fills the disk."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.observation.events import (
    EventLog,
    EventName,
    Events,
    Recording,
    histories_in,
    kept_documents,
    open_events,
    read_events,
)


def _file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_every_record_says_when_who_and_what(tmp_path):
    with EventLog(tmp_path / "new" / "events", logical_rank=3, generation=2) as events:
        events.emit(EventName.PLAN, 17, verdict="LOCALIZED", scope=[1, 2])
    record = json.loads(_file(tmp_path / "new" / "events").read_text())
    assert record.pop("time") > 0
    assert record == {
        "logical_rank": 3,
        "pid": os.getpid(),
        "generation": 2,
        "iteration": 17,
        "event": "plan",
        "verdict": "LOCALIZED",
        "scope": [1, 2],
    }


def test_the_names_that_tools_rely_on_exist():
    names = {name.value for name in EventName}
    assert names >= {
        "process_start",
        "iteration",
        "window_persisted",
        "fault_detected",
        "plan",
        "replay",
        "recovered",
        "checkpoint_saved",
    }


def test_a_process_keeps_its_file_over_generations(tmp_path):
    for generation in range(3):
        with EventLog(tmp_path, logical_rank=generation, generation=generation) as events:
            events.emit(EventName.ITERATION, generation)
    _file(tmp_path)
    assert [(e.generation, e.logical_rank) for e in read_events(tmp_path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]


def test_documents_lie_whole_beside_the_events_in_the_order_of_time(tmp_path):
    with EventLog(tmp_path, logical_rank=0, generation=0) as events:
        for text in ("first", "second"):
            events.keep("facts", text)
        events.emit(EventName.ITERATION, 1)
    assert [path.read_text() for path in kept_documents(tmp_path, "facts")] == ["first", "second"]
    assert kept_documents(tmp_path, "other") == []
    assert [event.iteration for event in read_events(tmp_path)] == [1]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_document_that_can_not_be_written_ends_the_recording_with_a_line(tmp_path, caplog):
    folder = tmp_path / "events"
    with EventLog(folder, logical_rank=0, generation=0) as events:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        events.keep("facts", "text")
        events.emit(EventName.ITERATION, 1)
    assert "no more events are recorded" in caplog.text


@pytest.mark.parametrize("recording", [None, Recording()])
def test_records_of_several_threads_do_not_mix(tmp_path, recording):
    with EventLog(tmp_path, 0, 0, recording) as events:

        def emit(thread: int) -> None:
            for k in range(200):
                name = (EventName.REPLAY, EventName.WINDOW_PERSISTED)[k % 2]
                events.emit(name, k, thread=thread, text="x" * (k * 7 % 300))

        threads = [threading.Thread(target=emit, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [(e.fields["thread"], e.iteration) for e in read_events(tmp_path)]
    assert sorted(found) == [(n, k) for n in range(4) for k in range(200)]


def test_what_happened_survives_a_kill_and_all_that_came_before_it(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from megatron_moevement.runtime.observation.events import *\n"
        f"events = EventLog({str(tmp_path)!r}, 0, 0, Recording())\n"
        "for k in range(1, 100):\n"
        "    events.emit(EventName.ITERATION, k)\n"
        "events.emit(EventName.FAULT_INJECTED, 100)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program], env=env, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [e.iteration for e in read_events(tmp_path)] == list(range(1, 101))


def test_numbers_that_json_lacks_are_written_as_text(tmp_path):
    with EventLog(tmp_path, 0, 0) as events:
        events.emit(EventName.ITERATION, 1, loss=math.nan, grads=[math.inf, 1.0])
    (record,) = read_events(tmp_path)
    assert record.fields == {"loss": "nan", "grads": ["inf", 1.0]}


def test_a_full_disk_costs_events_and_nothing_else(tmp_path, caplog):
    with EventLog(tmp_path, 0, 0) as events:
        events.emit(EventName.ITERATION, 1)
        size = _file(tmp_path).stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            events.emit(EventName.ITERATION, 2)  # 20 bytes of it fit
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert caplog.messages[-1].endswith("the disk is full; no more events are recorded")
        events.emit(EventName.ITERATION, 3)
    assert _file(tmp_path).stat().st_size == size + 20
    assert [e.iteration for e in read_events(tmp_path)] == [1]
    with EventLog(tmp_path, 0, 1) as events:
        events.emit(EventName.ITERATION, 4)
    assert [e.iteration for e in read_events(tmp_path)] == [1, 4]


def test_a_whole_line_that_is_no_event_is_refused_by_the_reader(tmp_path):
    (tmp_path / "host-1.jsonl").write_text('{"time": 1, "event": "iteration"}\n')
    with pytest.raises(ValueError, match=r"host-1\.jsonl:1 is no event"):
        read_events(tmp_path)


def test_an_event_of_a_newer_build_and_a_torn_last_line_are_left_out(tmp_path):
    with EventLog(tmp_path, 0, 0) as events:
        events.emit(EventName.ITERATION, 1)
        path = _file(tmp_path)
        line = path.read_text()
        with path.open("a") as file:
            file.write(line.replace('"event": "iteration"', '"event": "of_tomorrow"'))
        events.emit(EventName.ITERATION, 2)
    with path.open("a") as file:
        file.write(line[:30])
    assert [event.iteration for event in read_events(tmp_path)] == [1, 2]
    (read,) = histories_in(tmp_path).values()
    assert [event.iteration for event in read()] == [event.iteration for event in read()] == [1, 2]


def test_a_folder_that_can_not_be_written_is_the_users_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--moevement-event-dir .*give a writable folder"):
        EventLog(tmp_path / "file", 0, 0)


def test_without_a_folder_events_go_nowhere():
    events = open_events(None, 0, 0)
    assert type(events) is Events
    events.emit(EventName.ITERATION, 1, loss=1.0)
    events.close()


def test_what_is_emitted_after_the_end_is_forgotten(tmp_path):
    events = EventLog(tmp_path, 0, 0)
    events.close()
    events.emit(EventName.ITERATION, 1)
    events.close()
    assert read_events(tmp_path) == []
