# SPDX-License-Identifier: Apache-2.0
"""A lost stage replays from its neighbours' logs; the others stand by, and no bit differs."""

import re
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.default_run import slow_but
from tests.harness.fork_server import JobFailedError
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
TRAIN_ITERS = TARGET + 4
PP3 = ("--pipeline-model-parallel-size=3", "--num-layers=3", "--expert-model-parallel-size=1")
PP4 = ("--pipeline-model-parallel-size=4", "--num-layers=4", "--expert-model-parallel-size=1")
PP2 = "--expert-model-parallel-size=1"
TP2_PP2 = "--pipeline-model-parallel-size=2"
JOBS = {
    "pp2": LocalizedJob.of("pp2-ep2 bf16 replicated bias", 2, 2, 6, UNTIED, PP2),
    "pp2-dp2": LocalizedJob.of("pp2-ep2 bf16 replicated bias", 4, 2, 3, UNTIED, PP2),
    "pp2-ep2": LocalizedJob.of("pp2-ep2 bf16 distributed-overlap bias", 4, 2, 3, UNTIED),
    "tp2-pp2": LocalizedJob.of("tp2 bf16 distributed-overlap", 4, 2, 3, UNTIED, TP2_PP2),
    "pp3": LocalizedJob.of("pp2-ep2 bf16 replicated-overlap bias", 3, 3, 6, UNTIED, *PP3),
    "pp3-dp2": LocalizedJob.of("pp2-ep2 fp16 distributed grouped", 6, 3, 3, UNTIED, *PP3),
    "pp4-tied": LocalizedJob.of("pp2-ep2 fp32 replicated", 4, 4, 6, *PP4),
    "dense": LocalizedJob.of("dense pp2-ep2 bf16 distributed dropout", 3, 3, 6, UNTIED, *PP3),
    "vpp2": LocalizedJob.of("vpp2 fp16 distributed recomputed seq-aux", 2, 2, 12, UNTIED),
}
NEXT = f"{TARGET + 1}:prepare"
"""With the gradients of the step after the target, before anybody may apply them."""
AT_BARRIER = f"{TARGET}:barrier"
LATER = f"{TARGET + 2}:gather"
CASES = {
    "first of two": ("pp2-ep2", Loss((1,), (0,))),
    "last of two, survivors behind": ("pp2-ep2", Loss((2,), (1,), behind=(0, 3), rolled=1)),
    "in the next step": ("pp2-ep2", Loss((0,), (0,), everybody=NEXT)),
    "first of three": ("pp3", Loss((0,), (0,))),
    "middle, survivors behind": ("pp3-dp2", Loss((3,), (1,), behind=(0, 1, 2, 5), rolled=3)),
    "last of three": ("pp3", Loss((2,), (2,), behind=(1,), rolled=1)),
    "two adjacent, survivors behind the lost": (
        "pp3",
        Loss((1, 2), (1, 2), behind=(0,), target=TARGET - 1),
    ),
    "torn commit": ("pp3", Loss((), (1,), torn=(1,), behind=(2,), rolled=1)),
    "before the norm": (
        "pp2-dp2",
        Loss((1,), (0,), early=(1, 3), everybody=AT_BARRIER, target=TARGET - 1),
    ),
    "a tensor peer, survivors behind": ("tp2-pp2", Loss((2,), (1,), behind=(0, 3), rolled=1)),
    "torn commit of a tensor peer": ("tp2-pp2", Loss((), (0,), torn=(1,), behind=(3,), rolled=1)),
    "interleaved": ("vpp2", Loss((0,), (0,))),
    "tied ends": ("pp4-tied", Loss((3,), (0, 3), behind=(1,), rolled=1)),
    "one after the other": (
        "pp3",
        Loss((0,), (0,)),
        Loss((1,), (1,), everybody=LATER, target=TARGET + 2),
    ),
    "middle of a dense model, survivors behind": ("dense", Loss((1,), (1,), behind=(0,), rolled=1)),
    "nobody": ("pp2", Loss(behind=(0,), rolled=1, verdict="RESUME")),
}
QUICK = ("torn commit", "one after the other")


@pytest.fixture
def plain(plainly_trained):
    """Returns what each rank of a job ends with that nothing interrupts."""
    return lambda name: plainly_trained(JOBS[name], TRAIN_ITERS)


@pytest.fixture
def run_of(megatron_fork_server, text, tmp_path):
    """Returns a function that makes a run of a job."""
    return lambda name: LocalizedRun(megatron_fork_server, JOBS[name], text, TRAIN_ITERS, tmp_path)


@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
def test_only_the_lost_stage_replays_and_no_bit_differs(run_of, plain, name):
    job, *losses = CASES[name]
    run = run_of(job)
    copies = max(1, *(len(loss.lost) for loss in losses))
    found = run.train(losses, f"--moevement-replicas={copies}")
    assert differences(found, plain(job)) == []
    run.check(losses, found)


SUMS = ("--log-num-zeros-in-grad", "--log-params-norm")


def test_a_stage_that_replays_alone_waits_for_nobody_to_log_its_sums(run_of, plain):
    job, loss = CASES["first of two"]
    run = run_of(job)
    found = run.train([loss], "--log-interval=1", *SUMS)
    assert differences(found, plain(job)) == []
    run.check([loss], found)


@pytest.mark.slow
def test_without_a_log_all_stages_replay(run_of, plain):
    run, loss = run_of("pp2"), Loss((1,), (0, 1), verdict="GLOBAL")
    found = run.train([loss], "--moevement-no-upstream-log")
    assert differences(found, plain("pp2")) == []
    run.check([loss], found)


@pytest.mark.slow
def test_what_was_lost_before_a_window_was_persisted_is_trained_again(run_of, plain):
    found = run_of("pp2").train([Loss((), torn=(0,), everybody="2:gather")])
    assert differences(found, plain("pp2")) == []


def phases_of(run, generation, rank):
    """Returns the phases of a rank in a generation, in order."""
    events = events_of(run, EventName.PHASE, generation)
    return [event.fields["phase"] for event in events if event.logical_rank == rank]


REAL = Case.of("pp2-ep2 bf16 distributed grouped", 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 0), (1, 3)])
def test_a_spare_replays_the_stage_of_a_killed_process(megatron_fork_server, text, tmp_path, ranks):
    plain_program = REAL.program(megatron_fork_server, text, UNTIED)
    expected = Run(plain_program, tmp_path / "plain").finish()
    program = restartable_program(REAL, megatron_fork_server, text, len(ranks), UNTIED)
    run = Run(program, tmp_path / "killed")
    random = Random(str(ranks))
    with run.start() as job:
        for number, rank in enumerate(ranks):
            await_step(run, job, REAL.protected_from + 3 * number)
            kill_rank(run, job, rank, random)
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, -9, 0, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), expected) == []
    for generation, rank in enumerate(ranks, start=1):
        stage = rank // 2
        plans = events_of(run, EventName.PLAN, generation)
        assert {plan.fields["verdict"] for plan in plans} == {"LOCALIZED"}
        assert {tuple(plan.fields["scope"]) for plan in plans} == {(stage,)}
        for event in events_of(run, EventName.RECOVERED, generation):
            phases = phases_of(run, generation, event.logical_rank)
            assert phases[:2] == ["settling", "restoring"]
            assert phases[3:5] == ["rejoining", "training"]
            assert phases[2] == ("replaying" if event.logical_rank // 2 == stage else "standing by")
            if event.logical_rank // 2 == stage:
                assert event.fields["replayed_steps"] >= REAL.window - 1
                assert event.fields["replay_verified"] is True
            else:
                assert event.fields["forward_passes"] == event.fields["backward_passes"] == 0


RELEASED = "ReleasedGroupError: .* of a process group that no restart has replaced"
BROKEN_BARRIER = r"pp1\.dp1.* holds step 8 with finished gradients of step None and can't follow"
MUTATED = {
    "serve-step-before": ("pp2", Loss((0,), (0,)), "unverified"),
    "serve-other-micro-batch": ("pp2", Loss((1,), (1,)), "unverified"),
    "replay-with-other-tensor-peer": ("tp2-pp2", Loss((0,), (0,)), "unverified"),
    "log-by-buffer-slot": ("pp2", Loss((1,), (1,)), "unverified"),
    "skip-roll-forward": ("pp3", Loss((2,), (2,), behind=(1,), rolled=1), "verified"),
    "keep-noted-expert-bias": ("pp2", Loss((0,), (0,), everybody=NEXT), "verified"),
    "keep-random-streams": ("pp2", Loss((0,), (0,), everybody=NEXT), "verified"),
}
"""What a rank does wrongly, when, and whether the replay itself proves to be right."""
FAILING = {
    "rebind-all-groups-but-one": ("pp2", Loss((0,), (0,)), RELEASED),
    "remove-barrier": ("pp2-dp2", Loss((1,), (0,), early=(1, 3)), BROKEN_BARRIER),
}
"""What a rank does wrongly, when, and what the job fails with."""


@pytest.mark.parametrize("mutation", slow_but(("serve-step-before",), MUTATED))
def test_a_mutation_is_seen(run_of, plain, mutation, red):
    job, loss, replay = MUTATED[mutation]
    run = run_of(job)
    if replay == "unverified":
        with pytest.raises(JobFailedError, match="differs from the first time on"):
            run.train([loss], mutation=mutation)
        assert not run.is_verified()
        red(mutation, "the replay differs from the first time, and the job stops")
        return
    found = run.train([loss], mutation=mutation)
    wrong = differences(found, plain(job))
    assert wrong != []
    assert run.is_verified()
    red(mutation, f"{len(wrong)} digests and losses differ, the replay is verified")


@pytest.mark.parametrize("mutation", slow_but((), FAILING))
def test_a_mutation_ends_the_job(run_of, mutation, red):
    job, loss, says = FAILING[mutation]
    with pytest.raises(JobFailedError, match=says) as failed:
        run_of(job).train([loss], mutation=mutation)
    red(mutation, next(line for line in str(failed.value).splitlines() if re.search(says, line)))
