# SPDX-License-Identifier: Apache-2.0
"""Who follows a folder of events sees each of them once, whatever becomes of the files."""

from megatron_moevement.runtime.observation.event_file import parts_of
from megatron_moevement.runtime.observation.event_tail import EventTail
from megatron_moevement.runtime.observation.events import EventLog, EventName, Recording


def seen(tail):
    return [record.iteration for _, record in tail.news()]


def test_each_look_gives_what_is_new_in_the_order_of_time(tmp_path):
    tail = EventTail(tmp_path / "events")
    assert seen(tail) == []
    with EventLog(tmp_path / "events", 0, 0) as events:
        events.emit(EventName.PLAN, 1)
        events.emit(EventName.PLAN, 2)
        assert seen(tail) == [1, 2]
        assert seen(tail) == []
        events.emit(EventName.PLAN, 3)
    other = tmp_path / "events" / "other.jsonl"
    (path,) = (tmp_path / "events").iterdir()
    line = path.read_text().splitlines()[0]
    other.write_text(f"{line}\n")
    assert seen(tail) == [1, 3]


def test_a_line_that_is_not_whole_yet_comes_later_and_a_damaged_one_never(tmp_path):
    with EventLog(tmp_path, 0, 0) as events:
        events.emit(EventName.PLAN, 1)
    (path,) = tmp_path.iterdir()
    line = path.read_text()
    tail = EventTail(tmp_path)
    with path.open("a") as file:
        file.write('{"time": 1}\n[]\nnull\n' + "[" * 100_000 + "\n" + line[:20])
    assert seen(tail) == [1]
    with path.open("a") as file:
        file.write(line[20:].replace('"iteration": 1', '"iteration": 2'))
    assert seen(tail) == [2]


def test_files_that_are_put_aside_between_two_looks_are_read_to_their_ends(tmp_path):
    tail = EventTail(tmp_path)
    found = []
    with EventLog(tmp_path, 0, 0, Recording(most_bytes=1 << 13)) as events:
        for number in range(1, 301):
            events.emit(EventName.WINDOW_PERSISTED, number, text="x" * 100)
            events.emit(EventName.PLAN, number)
            if number % 7 == 0:
                found += seen(tail)
        (path,) = (one for one in tmp_path.glob("*.jsonl") if ".part" not in one.name)
        assert any(part.is_compact for part in parts_of(path))
    found += seen(tail)
    assert sorted(found) == [number for number in range(1, 301) for _ in range(2)]


def test_what_was_put_aside_before_the_first_look_is_read_too(tmp_path):
    with EventLog(tmp_path, 0, 0, Recording(most_bytes=1 << 13)) as events:
        for number in range(1, 301):
            events.emit(EventName.WINDOW_PERSISTED, 0, text="x" * 100)
            events.emit(EventName.PLAN, number)
    assert [number for number in seen(EventTail(tmp_path)) if number] == list(range(1, 301))


def test_a_file_that_became_a_sum_between_two_looks_is_not_read_twice(tmp_path):
    tail = EventTail(tmp_path)
    with EventLog(tmp_path, 0, 0, Recording(most_bytes=1 << 13)) as events:
        events.emit(EventName.WINDOW_PERSISTED, 0)
        events.emit(EventName.PLAN, 1)
        assert 1 in seen(tail)
        for number in range(2, 301):
            events.emit(EventName.WINDOW_PERSISTED, 0, text="x" * 100)
            events.emit(EventName.PLAN, number)
    late = [number for number in seen(tail) if number]
    assert 1 not in late
    assert late[-1] == 300
    assert sorted(set(late)) == late


def test_of_steps_of_another_rank_only_the_newest_are_read_and_of_the_first_rank_all(tmp_path):
    tail = EventTail(tmp_path)
    with EventLog(tmp_path, 3, 0) as events:
        for number in (1, 2, 3):
            events.emit(EventName.ITERATION, number, loss=1.0)
        events.emit(EventName.PLAN, 4)
        for number in (5, 6):
            events.emit(EventName.ITERATION, number)
    for rank, generation in ((3, 1), (0, 1), (2, 1)):
        with EventLog(tmp_path, rank, generation) as events:
            for number in (7, 8):
                events.emit(EventName.ITERATION, number)
    assert seen(tail) == [3, 4, 6, 8, 7, 8, 8]
    with EventLog(tmp_path, 2, 1) as events:
        events.emit(EventName.ITERATION, 9)
        assert seen(tail) == [9]
        events.emit(EventName.ITERATION, 10)
        (path,) = tmp_path.iterdir()
        with path.open("a") as file:
            file.write(path.read_text().splitlines()[-1].replace("10", "11"))
        assert seen(tail) == [10]
        with path.open("a") as file:
            file.write("\n")
        assert seen(tail) == [11]


def test_a_file_that_is_put_aside_during_a_look_is_read_once(tmp_path):
    looks = []
    with EventLog(tmp_path, 0, 0, Recording(most_bytes=1 << 13)) as events:
        for number in range(1, 31):
            if number in {2, 15, 25}:
                looks.append(EventTail(tmp_path).news())
            events.emit(EventName.PLAN, number, text="x" * 100)
    (path,) = (one for one in tmp_path.glob("*.jsonl") if ".part" not in one.name)
    assert len(parts_of(path)) > 1
    for look in looks:
        assert [record.iteration for _, record in look] == list(range(1, 31))
