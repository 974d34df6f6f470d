# SPDX-License-Identifier: Apache-2.0
"""The job that benchmarks start: what they read of its events while it writes them."""

import json

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.benchmarks import benchmark


def line(step: int, rank: int = 0, generation: int = 0) -> bytes:
    fields = {
        "event": EventName.ITERATION.value,
        "time": 100.0 + step,
        "logical_rank": rank,
        "generation": generation,
        "iteration": step,
        "pid": 1,
    }
    return json.dumps(fields).encode() + b"\n"


@pytest.fixture
def job(tmp_path):
    found = object.__new__(benchmark("recovery").Job)
    found.folder, found._events, found._read_bytes = tmp_path, [], {}
    (tmp_path / "events").mkdir()
    return found


def steps(job, generation=0):
    return [one.iteration for one in job.events(EventName.ITERATION, generation)]


def test_each_event_is_read_once_and_in_the_order_of_time(job):
    first, second = (job.folder / "events" / f"rank{rank}.jsonl" for rank in range(2))
    first.write_bytes(line(1) + line(3))
    assert steps(job) == [1, 3]
    second.write_bytes(line(2, rank=1) + line(1, generation=1))
    with first.open("ab") as file:
        file.write(line(4))
    assert steps(job) == [1, 2, 3, 4] == steps(job)
    assert steps(job, generation=1) == [1]


def test_a_line_that_is_not_whole_yet_is_read_when_it_is(job):
    path, whole = job.folder / "events" / "rank0.jsonl", line(2)
    path.write_bytes(line(1) + whole[:20])
    assert steps(job) == [1]
    with path.open("ab") as file:
        file.write(whole[20:])
    assert steps(job) == [1, 2]
