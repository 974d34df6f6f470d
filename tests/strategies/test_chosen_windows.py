# SPDX-License-Identifier: Apache-2.0
"""A job that chooses its own W ends with the bits of one that nothing protects."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.settings.faults import FaultPoint
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, die, plans_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed bias", 4)
PROGRAM = Path(__file__).with_name("measured_pretrain.py")


def events_of(run, name, rank=0):
    return [
        event
        for event in read_events(run.events)
        if (event.event, event.logical_rank) == (name, rank)
    ]


def windows_of(run):
    """Returns first step and W of the schedules that the ranks have agreed on."""
    return [
        (event.fields["first_step"], event.fields["window"])
        for event in events_of(run, EventName.SCHEDULE)
    ]


def test_a_job_that_measures_and_is_killed_ends_with_the_same_bits(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(
        CASE.protected_program(megatron_fork_server, text, "--moevement-window=auto"), tmp_path
    )
    die(run, CASE, FaultPoint.GATHER, [19])
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert [plan["verdict"] for plan in plans_of(run)] == ["GLOBAL"]
    steps = events_of(run, EventName.ITERATION)
    spent = [step.fields for step in steps[4:]]
    for name in ("copy_s", "hash_s", "log_s"):  # of a step may come with the next one
        assert sum(each[name] for each in spent) > 0
    assert {process for each in spent for process in each["send_s"]} == {"1", "2"}


@pytest.fixture
def trained(megatron_fork_server, text, uninterrupted, tmp_path):
    """Trains a job that measures something else from a step on, and kills all processes once."""

    def run_of(deaths, changed_from, change, killed_at):
        case = dataclasses.replace(CASE, deaths=deaths)
        flags = ("--moevement-window=auto", "--moevement-max-replay-steps=9")
        program = case.protected_program(megatron_fork_server, text, *flags)
        flags = (f"--stalled={changed_from}", change, *program.flags)
        run = Run(dataclasses.replace(program, path=PROGRAM, flags=flags), tmp_path)
        if killed_at is not None:
            die(run, case, FaultPoint.GATHER, [killed_at])
        assert digest_differences(run.finish(), uninterrupted(case)) == []
        return run

    return run_of


def sizes_of(run):
    """Returns the W that the ranks came to, one after the other."""
    return [window for window, _ in itertools.groupby(window for _, window in windows_of(run))]


@pytest.mark.parametrize(
    ("killed_at", "link"),
    [
        pytest.param(None, 1.2, id="never", marks=pytest.mark.slow),
        pytest.param(30, 1.2, id="between choice and edge", marks=pytest.mark.slow),
        pytest.param(47, 1.2, id="under the smaller W", marks=pytest.mark.slow),
        pytest.param(68, 0.01, id="under empty slots"),
    ],
)
def test_all_ranks_come_to_the_w_that_was_chosen_and_lose_no_bit(trained, killed_at, link):
    run = trained(8, 56, f"--link={link}", killed_at)
    choices = [event.fields for event in events_of(run, EventName.WINDOW_CHOSEN)]
    chosen = [
        (each["former"], each["window"], each["reason"]) for each in choices if each["used"] is None
    ]
    assert choices[-1]["used"] == (1 if link < 1 else None)
    assert min(each["contention_s"] for each in choices) > 0  # CPU times are asked for
    assert choices[-1]["reason"] == ("no window fits" if link < 1 else "stalls")
    assert chosen[0] == (4, 1, "slack")
    *before, last = sizes_of(run)
    assert before[-2:] == [2, 1]
    assert 1 < last <= 5
    assert all(window <= 5 for window in before)
    if killed_at is None:
        on_its_way, (former, larger, reason) = chosen[1:]
        assert on_its_way == (2, 1, "slack")
        assert (former, reason) == (1, "stalls")
        assert [*before, last] == [4, 2, 1, larger]


def test_a_smaller_w_that_was_tried_is_given_up_by_those_who_did_not_choose_it(trained):
    """All processes are killed in the trial: what was measured before it is in memory alone."""
    run = trained(8, 46, "--longer=1.5", killed_at=47)
    choices = [event.fields for event in events_of(run, EventName.WINDOW_CHOSEN)]
    chosen = [(each["former"], each["window"], each["reason"]) for each in choices]
    assert chosen == [(4, 1, "slack"), (2, 1, "slack"), (1, 4, "costs")]
    assert sizes_of(run) == [4, 2, 1, 4]


@pytest.mark.slow
def test_the_end_of_a_trial_outlasts_the_death_of_all_processes(trained):
    """Iterations that are longer after the trial give W up no more, whoever chooses."""
    run = trained(15, 115, "--longer=1.5", killed_at=118)
    choices = [event.fields for event in events_of(run, EventName.WINDOW_CHOSEN)]
    assert {each["reason"] for each in choices} == {"slack"}
    windows = windows_of(run)
    (began,) = {step for step, window in windows[:-1] if window == 1}
    assert windows[-1][1] == 1
    assert windows[-1][0] - began >= 12 * 4
