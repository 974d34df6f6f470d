# SPDX-License-Identifier: Apache-2.0
"""A lost state comes from a replica that still holds it: nobody replays, and no bit differs."""

import dataclasses
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.testing.lost_states import LostStates
from tests.harness.default_run import slow_but
from tests.harness.interruption import Run, digest_differences
from tests.harness.localized_run import (
    TARGET,
    LocalizedJob,
    LocalizedRun,
    Loss,
    differences,
)
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    events_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

UNTIED = "--untie-embeddings-and-output-weights"
ALL_EXPERTS = "--expert-model-parallel-size=1"
TRAIN_ITERS = TARGET + 7
"""Until a ring has no more room, unless windows are persisted that hold slots of before."""
JOBS = {
    "pp2-dp2": LocalizedJob.of(
        "pp2-ep2 bf16 replicated-overlap bias", 4, 2, 3, UNTIED, ALL_EXPERTS
    ),
    "tied": LocalizedJob.of("pp2-ep2 fp16 replicated grouped", 4, 2, 3, ALL_EXPERTS),
    "edp3": LocalizedJob.of("edp3 fp32 replicated", 3, 1, 2),
    "distributed": LocalizedJob.of("pp2-ep2 bf16 distributed", 4, 2, 3, UNTIED, ALL_EXPERTS),
    "ep2": LocalizedJob.of("pp2-ep2 bf16 replicated", 4, 2, 3, UNTIED),
}
NEXT = f"{TARGET + 1}:prepare"
WITHIN = {"everybody": f"{TARGET + 1}:gather", "target": TARGET + 1}
"""In the middle of a window: slots of it are older than the state that is copied."""
LATER = {"everybody": f"{TARGET + 3}:gather", "target": TARGET + 3}
COPIED = Loss((2,), (), behind=(0, 3), rolled=2, verdict="COPIED", **WITHIN)
"""Rank 3 is what rank 2 was; it still has to apply the step that others have committed."""
BOTH_LATER = Loss((0, 1), (0, 1), verdict="GLOBAL", **LATER)
CASES = {
    "survivors behind": ("pp2-dp2", COPIED),
    "in the next step": ("pp2-dp2", Loss((1,), (), everybody=NEXT, verdict="COPIED")),
    "torn commit": ("pp2-dp2", Loss((), (), torn=(2,), verdict="COPIED")),
    "both stages": ("pp2-dp2", Loss((0, 3), (), verdict="COPIED")),
    "tied ends": ("tied", Loss((1,), (), behind=(0,), rolled=1, verdict="COPIED")),
    "two of three, one stage": ("edp3", Loss((0, 2), (), verdict="COPIED")),
    # What was copied has no log of the steps before: its stage has to replay, too.
    "then a neighbour": ("pp2-dp2", COPIED, BOTH_LATER),
    "then its replica": ("pp2-dp2", COPIED, Loss((3,), (), verdict="COPIED", **LATER)),
    "shards are nobody else's": ("distributed", Loss((2,), (1,))),
    "experts are nobody else's": ("ep2", Loss((2,), (1,))),
}


@pytest.fixture
def plain(plainly_trained):
    """Returns what each rank of a job ends with that nothing interrupts."""
    return lambda name: plainly_trained(JOBS[name], TRAIN_ITERS)


@pytest.fixture
def run_of(megatron_fork_server, text, tmp_path):
    """Returns a function that makes a run of a job."""
    return lambda name: LocalizedRun(megatron_fork_server, JOBS[name], text, TRAIN_ITERS, tmp_path)


def copies_in(run):
    """Returns what each plan of a run copied, by rank."""
    plans = [
        event
        for event in read_events(run.folder / "events")
        if event.event is EventName.PLAN and event.logical_rank == 0
    ]
    return [len(plan.fields["copies"]) for plan in plans]


@pytest.mark.parametrize("name", slow_but(("survivors behind",), CASES))
def test_nobody_replays_where_a_replica_is_left(run_of, plain, name):
    job, *losses = CASES[name]
    run = run_of(job)
    found = run.train(losses, "--moevement-replicas=2", lost=LostStates.COPIED)
    assert differences(found, plain(job)) == []
    run.check(losses, found)
    expected = [(len(loss.lost) + len(loss.torn)) * (loss.verdict == "COPIED") for loss in losses]
    assert copies_in(run) == expected


@pytest.mark.slow
def test_without_copies_the_same_loss_is_replayed(run_of, plain):
    run, loss = (
        run_of("pp2-dp2"),
        dataclasses.replace(COPIED, scope=(1,), rolled=1, verdict="LOCALIZED"),
    )
    found = run.train([loss], "--moevement-replicas=2", "--moevement-no-replica-copy")
    assert differences(found, plain("pp2-dp2")) == []
    run.check([loss], found)
    assert copies_in(run) == [0]


MUTATED = {
    "copy-before-roll-forward": COPIED,
    "keep-random-streams": Loss((2,), (), verdict="COPIED"),
    "copy-no-step-counters": Loss((2,), (), verdict="COPIED"),
}


@pytest.mark.parametrize("mutation", slow_but(("copy-before-roll-forward",), MUTATED))
def test_a_copy_of_something_else_is_seen(run_of, plain, mutation):
    run = run_of("pp2-dp2")
    found = run.train([MUTATED[mutation]], mutation=mutation, lost=LostStates.COPIED)
    assert copies_in(run) == [1]
    assert differences(found, plain("pp2-dp2")) != []


REAL = dataclasses.replace(
    Case.of("pp2-ep2 bf16 replicated-overlap grouped", 3), lost=LostStates.COPIED
)


@pytest.mark.slow
def test_spares_copy_the_states_of_killed_processes(megatron_fork_server, text, tmp_path):
    flags = (UNTIED, ALL_EXPERTS)
    expected = Run(REAL.program(megatron_fork_server, text, *flags), tmp_path / "plain").finish()
    ranks = (2, 0)
    program = restartable_program(REAL, megatron_fork_server, text, len(ranks), *flags)
    run = Run(program, tmp_path / "killed")
    random = Random("copied")
    with run.start() as job:
        for number, rank in enumerate(ranks):
            await_step(run, job, REAL.protected_from + 3 * number)
            kill_rank(run, job, rank, random)
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, -9, 0, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), expected) == []
    for generation in range(1, len(ranks) + 1):
        plans = events_of(run, EventName.PLAN, generation)
        assert {plan.fields["verdict"] for plan in plans} == {"COPIED"}
        for event in events_of(run, EventName.RECOVERED, generation):
            assert event.fields["replayed_steps"] == 0
            assert event.fields["forward_passes"] == event.fields["backward_passes"] == 0
