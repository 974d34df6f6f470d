# SPDX-License-Identifier: Apache-2.0
"""The window schedule changes while a job trains; no fault at any moment of that changes a bit."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from megatron_moevement.policy.facts.facts_document import FACTS, load_facts
from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.settings.faults import FaultPoint
from tests.harness.default_run import slow_but
from tests.harness.fork_server import JobFailedError
from tests.harness.interruption import Run, digest_differences
from tests.harness.localized_run import LocalizedJob, LocalizedRun, Loss, differences
from tests.harness.protected_run import Case, check_replays, die, plans_of

SLOW = pytest.mark.slow

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed bias", 4)
BY_INDEX = "--moevement-order=index"
LIMITS = ("--moevement-min-window=2", "--moevement-max-window=5", BY_INDEX)
CHANGED_AFTER = 11
"""By then a window is persisted: the ring has no more room."""
EDGE = 16
"""Windows begin at 0, 4, 8, 12 and 16: the first after the ranks agreed."""


def schedules_of(events):
    """Returns first step, version and W of the schedules that the ranks have agreed on."""
    return [
        (event.fields["first_step"], event.fields["version"], event.fields["window"])
        for event in read_events(events)
        if (event.event, event.logical_rank) == (EventName.SCHEDULE, 0)
    ]


def known_in(folder):
    """Returns the facts of each recovery."""
    paths = sorted(folder.glob(f"*.{FACTS}.json"))
    return [load_facts(path.read_text(encoding="utf-8"), path.name) for path in paths]


def test_all_ranks_go_by_another_schedule_from_one_step_on(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    flags = ("--moevement-schedule-changes=5:2,10:5", *LIMITS)
    run = Run(CASE.protected_program(megatron_fork_server, text, *flags), tmp_path)
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    assert [each[1:] for each in schedules_of(run.events)] == [(1, 2), (2, 5)]
    windows = [
        (event.fields["start"], event.fields["size"])
        for event in read_events(run.events)
        if (event.event, event.logical_rank) == (EventName.WINDOW_PERSISTED, 0)
    ]
    assert {size for _, size in windows} == {4, 2, 5}
    assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(windows))


@pytest.mark.parametrize(
    ("step", "place", "is_agreed", "is_in_force"),
    [
        pytest.param(12, FaultPoint.BARRIER, False, False, id="before the agreement", marks=SLOW),
        pytest.param(15, FaultPoint.GATHER, True, False, id="before the edge", marks=SLOW),
        pytest.param(EDGE, FaultPoint.COMMITTED, True, True, id="at the edge"),
        pytest.param(18, FaultPoint.GATHER, True, True, id="after the edge", marks=SLOW),
        pytest.param(21, FaultPoint.PREPARE, True, True, id="later", marks=SLOW),
    ],
)
def test_a_job_that_is_killed_goes_on_by_the_schedules_that_it_agreed_on(
    megatron_fork_server, text, uninterrupted, tmp_path, step, place, is_agreed, is_in_force
):
    flags = (f"--moevement-schedule-changes={CHANGED_AFTER}:2", *LIMITS)
    run = Run(CASE.protected_program(megatron_fork_server, text, *flags), tmp_path)
    die(run, CASE, place, [step])
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    facts = known_in(run.events)[-1]
    (plan,) = plans_of(run)
    replayed = facts.processes[0].timetable.window_of(plan["window"])
    check_replays(run, dataclasses.replace(CASE, window=replayed.size), launches=1)
    for process in facts.processes:
        entries = process.timetable.entries
        assert [entry.window for entry in entries] == ([4, 2] if is_agreed else [4])
        assert (entries[-1].first_step == EDGE) is is_agreed
        sizes = {held.window.size for held in process.holdings}
        assert (2 in sizes) <= is_in_force
    assert schedules_of(run.events)[-1][1:] == (1, 2)


@pytest.mark.slow
def test_a_launch_with_another_window_finds_its_memory_and_changes_the_schedule(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    program = CASE.protected_program(megatron_fork_server, text, *LIMITS)
    run = Run(program, tmp_path)
    die(run, CASE, FaultPoint.GATHER, [12])
    assert digest_differences(run.finish("--moevement-window=3"), uninterrupted(CASE)) == []
    check_replays(run, CASE, launches=1)
    ((first_step, version, window),) = schedules_of(run.events)
    assert (first_step % 4, version, window) == (0, 1, 3)


def test_a_launch_that_may_replay_fewer_steps_finds_its_memory_and_lowers_the_window(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    chosen = ("--moevement-window=auto", BY_INDEX)
    run = Run(CASE.protected_program(megatron_fork_server, text, *chosen), tmp_path)
    die(run, CASE, FaultPoint.GATHER, [12])
    fewer = "--moevement-max-replay-steps=3"
    assert digest_differences(run.finish(fewer), uninterrupted(CASE)) == []
    windows = [window for _, _, window in schedules_of(run.events)]
    assert windows[0] == 2
    assert set(windows) <= {1, 2}


UNTIED = "--untie-embeddings-and-output-weights"
JOB = LocalizedJob.of(
    "pp2-ep2 bf16 replicated bias", 4, 2, 3, UNTIED, "--expert-model-parallel-size=1"
)
TRAIN_ITERS = 20
IN_PLACE = ("--moevement-schedule-changes=8:2", "--moevement-min-window=2", BY_INDEX)
"""Windows begin at 0, 3, 6, 9 and 12; the last of these edges is the first after an agreement."""
LOSSES = {
    "before the agreement": Loss((1,), (0,), everybody="8:gather", target=8),
    "before the edge": Loss((2,), (1,), everybody="11:gather", target=11),
    "at the edge": Loss((2,), (1,), behind=(0, 3), rolled=1, everybody="12:gather", target=12),
    "after the edge": Loss((0,), (0,), everybody="13:prepare", target=12),
    "later": Loss((3,), (1,), everybody="17:gather", target=17),
}


@pytest.mark.parametrize("name", slow_but(("after the edge",), LOSSES))
def test_a_lost_stage_replays_by_the_schedules_that_captured_its_windows(
    megatron_fork_server, text, tmp_path, plainly_trained, name
):
    run = LocalizedRun(megatron_fork_server, JOB, text, TRAIN_ITERS, tmp_path)
    found = run.train([LOSSES[name]], *IN_PLACE)
    assert differences(found, plainly_trained(JOB, TRAIN_ITERS)) == []
    run.check([LOSSES[name]], found)
    ((first_step, version, window),) = schedules_of(tmp_path / "events")
    assert (first_step % 3, version, window) == (0, 1, 2)
    assert first_step == 12 or name == "before the agreement"


MUTATED = Path(__file__).with_name("mutated_pretrain.py")


def mutated(megatron_fork_server, text, folder, mutation):
    """Returns a run whose schedule changes to W = 5 with something done wrongly."""
    flags = (f"--moevement-schedule-changes={CHANGED_AFTER}:5", *LIMITS)
    program = CASE.protected_program(megatron_fork_server, text, *flags)
    flags = (f"--mutation={mutation}", *program.flags)
    return Run(dataclasses.replace(program, path=MUTATED, flags=flags), folder)


@pytest.mark.parametrize("mutation", ["adopt-an-edge-early", "order-by-own-counts"])
def test_mutated_ranks_that_do_not_go_by_one_schedule_learn_it_at_the_next_barrier(
    megatron_fork_server, text, tmp_path, red, mutation
):
    says = "ranks have different schedules with the version 1"
    with pytest.raises(JobFailedError, match=says):
        mutated(megatron_fork_server, text, tmp_path, mutation).finish()
    red(mutation, says)


def test_a_mutated_window_history_that_reads_by_another_schedule_is_seen(
    megatron_fork_server, text, tmp_path, red
):
    says = "was captured under another schedule"
    run = mutated(megatron_fork_server, text, tmp_path, "read-by-the-newest-schedule")
    die(run, CASE, FaultPoint.GATHER, [15])
    with pytest.raises(JobFailedError, match=says):
        run.finish()
    red("read-by-the-newest-schedule", says)
