# SPDX-License-Identifier: Apache-2.0
"""The last line of a job that lost a process names it, its rank, its host, and what to do."""

import signal

import pytest

from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.report.casualties import HAS_ENDED, Casualty
from megatron_moevement.policy.report.last_lines import JobEnd, ProcessStop

KILLED = -signal.SIGKILL
LOST = Casualty(process=5, rank=1, host="node8", end="was killed", reason=HAS_ENDED)
HUNG = Casualty(process=5, rank=1, host="node8", reason="no progress")
FEW = "the job needs 4 processes and has 3"


def describe(code):
    return f"ended with {code}"


def stop(**changes):
    told = {
        "process": 0,
        "reason": FEW,
        "casualties": [LOST],
        "where": "memory",
        "step": 42,
        "first": "",
        "event_dir": None,
        **changes,
    }
    return ProcessStop(**told).line


def end(code, *ends, **changes):
    told = {"host": "node7", "is_protected": True, **changes}
    return JobEnd(code, list(enumerate(ends)), **told).line(describe)


def test_a_process_that_stops_names_the_loss_its_state_and_what_to_do():
    assert stop(where="/save/flushed", event_dir="/events") == (
        f"process 0 stops: {FEW}, after rank 1 on node8 (process 5) was killed; its state is in "
        "/save/flushed: launch the job again to go on; its newest step is 42; "
        "`moevement report /events` shows what happened"
    )
    assert stop(casualties=[HUNG], step=0) == (
        f"process 0 stops: {FEW}, after rank 1 on node8 (process 5): no progress; its state is in "
        "memory: launch the job again to go on"
    )


def test_a_process_that_keeps_nothing_names_what_else_is_to_be_done():
    assert stop(casualties=[], where=None, step=0) == (
        f"process 0 stops: {FEW}; it keeps no state of the job"
    )
    first = {"casualties": [], "first": "host new stores and ", "step": 0}
    assert stop(where=None, **first).endswith("; host new stores and launch the job again")
    assert stop(**first).endswith(
        "; its state is in memory: host new stores and launch the job again to go on"
    )


def test_a_job_that_stopped_names_the_newest_loss_first_and_then_those_before():
    line = end(
        *(75, KILLED, 0, 75, 75, 75, KILLED),
        reason=FEW,
        casualties=[HUNG],
        event_dir="/events",
    )
    assert line == (
        f"the job ended with exit code 75: {FEW}; rank 1 on node8 (process 5) ended with -9 "
        "(no progress); process 0 on node7 ended with -9; 3 of 6 processes keep their state "
        "(above: where): launch the job again as it was, with as many ranks, to go on; "
        "`moevement report /events` shows what happened"
    )


def test_how_a_process_ended_is_what_the_others_found_where_the_launcher_saw_it_leave():
    line = end(75, 75, casualties=[Casualty(0, 0, "node7", reason="an exception")])
    assert "code 75: rank 0 on node7 (process 0): an exception; 1 of 1 processes" in line
    assert "each process has a line with the reason (above); 1 of 1" in end(75, 75)


@pytest.mark.parametrize(
    ("code", "is_protected", "told"),
    [
        (ExitCode.INTERRUPTED, True, "nothing is kept in memory, a launch goes on from the newest"),
        (137, True, "what processes keep in memory is still there"),
        (137, False, "mend the reason (above), a launch goes on from the newest checkpoint"),
        (ExitCode.FAILURE, True, "launch the job again as it was"),
    ],
)
def test_an_end_says_what_to_do(code, is_protected, told):
    line = end(code, 0, KILLED, is_protected=is_protected)
    assert f"code {code}: process 1 on node7 ended with -9; " in line
    assert told in line


def test_a_job_that_is_done_names_all_that_were_lost():
    assert end(0, 0, KILLED, 75, event_dir="e") == (
        "the job is done in spite of what was lost: process 1 on node7 ended with -9; process 2 on "
        "node7 ended with 75; `moevement report e` shows what happened"
    )


def test_of_many_processes_some_are_named():
    line = end(1, *[1] * 12)
    assert line.count("ended with 1") == 8
    assert "; and 4 more; " in line


def test_an_end_without_a_loss_or_with_bad_arguments_needs_no_line():
    assert end(ExitCode.DONE, 0, 0) is None
    assert end(ExitCode.BAD_ARGUMENTS, 2, KILLED) is None
