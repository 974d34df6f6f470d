# SPDX-License-Identifier: Apache-2.0
"""A recovery that does one thing wrongly does not end with the same bits.

Without these, equal bits might come from a replay that has nothing to do. Some run by default, all:

    ./scripts/recovery_mutations.sh
"""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_moevement.settings.faults import FaultPoint
from tests.harness.fork_server import JobFailedError
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("mutated_pretrain.py")
RANDOM = "choose-experts-at-random"
SMALL = dataclasses.replace(Case.of("vpp2 fp16 replicated grouped", 2), deaths=1)
BIAS = Case.of("edp3 fp16 distributed bias", 3)
EXPERT_PARALLEL = Case.of("pp2-ep2 fp16 no-dropout", 2)
OVERLAPPED = Case.of("edp3 bf16 distributed-overlap", 3)


def quick(mutation, case, *others):
    return pytest.param(mutation, case, others, id=mutation)


def slow(mutation, case, *others):
    return pytest.param(mutation, case, others, id=mutation, marks=pytest.mark.slow)


SEEN = [
    quick("skip-first-step", SMALL),
    quick("shift-ledger", SMALL),
    slow("forget-expert-bias", BIAS),
    slow("forget-second-scaler", EXPERT_PARALLEL),
    slow("capture-gathered-parameters", OVERLAPPED),
    slow("forget-expert-stream", SMALL, RANDOM),
]
STOPPING = frozenset(param.id for param in SEEN)
"""Mutations that the replay's own proof finds."""
HARMLESS = [
    quick("do-nothing", SMALL),
    slow(RANDOM, SMALL),
    # The next slot overwrites what was stepped: it has all that is not trained yet.
    slow("step-frozen-operators", SMALL),
]


def mutated(program, mutations):
    flags = [f"--mutation={one}" for one in mutations]
    return dataclasses.replace(program, path=PROGRAM, flags=(*flags, *program.flags))


@pytest.fixture
def died(megatron_fork_server, text, tmp_path):
    """Returns a run under mutations that has died behind a persisted window."""

    def of(mutations, case):
        program = mutated(case.protected_program(megatron_fork_server, text), mutations)
        run = Run(program, tmp_path / "killed")
        fault = f"{case.protected_from + 2}:{FaultPoint.BARRIER.value}"
        with run.start("--moevement-faults", fault) as job:
            job.wait()
        return run

    return of


@pytest.fixture
def differences(megatron_fork_server, text, uninterrupted, tmp_path, died):
    """Returns where a run that dies and goes on under mutations differs from one that does not."""

    def of(mutation, case, others):
        if RANDOM in (mutation, *others):
            program = mutated(case.program(megatron_fork_server, text), [RANDOM])
            expected = Run(program, tmp_path / "uninterrupted").finish()
        else:
            expected = uninterrupted(case)
        run = died([mutation, *others], case)
        if mutation in STOPPING:
            with pytest.raises(JobFailedError, match="differs from the first time on") as failed:
                run.finish()
            codes = re.findall(r"-?\d+", str(failed.value).splitlines()[0])
            assert set(codes) == {"75"}, codes
            found = ["the job stops"]
        else:
            found = digest_differences(run.finish(), expected)
        (plan,) = plans_of(run)
        assert plan["verdict"] == "GLOBAL"
        assert plan["target"] - plan["window"] >= case.window - 1
        return found

    return of


@pytest.mark.parametrize(("mutation", "case", "others"), SEEN)
def test_a_mutation_changes_bits(differences, mutation, case, others, red):
    wrong = differences(mutation, case, others)
    assert wrong == ["the job stops"]
    red(mutation, *wrong)


@pytest.mark.parametrize(("mutation", "case", "others"), HARMLESS)
def test_what_mutates_nothing_that_counts_changes_no_bit(differences, mutation, case, others):
    assert differences(mutation, case, others) == []


def test_without_step_counters_the_dense_state_is_noticed_to_be_wrong(died, red):
    run = died(["drop-adam-step"], SMALL)
    says = "parameters count different steps"
    with pytest.raises(JobFailedError, match=says):
        run.finish()
    red("drop-adam-step", says)


REPLICATED = Case.of("pp2-ep2 bf16 replicated", 3)
HANG = (
    "--expert-model-parallel-size=1",
    "--untie-embeddings-and-output-weights",
    "--inprocess-soft-timeout=5",
    "--inprocess-hard-timeout=7",
    "--inprocess-max-iterations=2",
)


@pytest.mark.slow
def test_a_rank_that_hangs_in_front_of_the_norm_keeps_the_others_from_committing_by_the_barrier(
    megatron_fork_server, text, tmp_path, red
):
    step = REPLICATED.protected_from + 1
    program = restartable_program(REPLICATED, megatron_fork_server, text, 1, *HANG)

    def run(mutation):
        """Stops rank 1 of the pipeline 1, 3 for so long that the other pipeline could go on."""
        run = Run(mutated(program, [mutation]), tmp_path / mutation)
        with run.start("--moevement-faults", f"stop:{step}:prepare@1") as job:
            return job.wait(), {plan["target"] for plan in plans_of(run)}

    whole, targets = run("do-nothing")
    assert sorted(whole.exit_codes) == [-9, 0, 0, 0, 0], whole.describe()
    assert targets == {step - 1}
    broken, _ = run("remove-barrier")
    assert 0 not in broken.exit_codes
    says = f"holds step {step - 1} with finished gradients of step None and can't follow to step"
    assert says in broken.describe()
    red("remove-barrier", says)


def moved_while_frozen(mutation):
    """Returns which tensors of frozen operators a step moves, under a mutation."""
    from megatron_moevement.runtime.coordination.commit_barrier import StopRequest  # noqa: PLC0415
    from megatron_moevement.runtime.coordination.progress import START  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415
    from tests.harness.frozen_step import FrozenStep, differences  # noqa: PLC0415
    from tests.harness.recovery_mutations import MUTATIONS  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    MUTATIONS[mutation]()
    with tiny_job("--bf16") as job, open_steps(job, build_datasets(job), START) as step:
        step.run(StopRequest.NONE)
        frozen = FrozenStep(job, step.micro_batches())
        statistics = frozen.run(frozenset(frozen.operators())).statistics
        frozen.restore()
        before = frozen.state()
        after = frozen.run(frozenset(), statistics).state
        return [name for one in before for name in differences(before[one], after[one])]


@pytest.mark.parametrize(
    ("mutation", "moves"), [("do-nothing", False), ("step-frozen-operators", True)]
)
def test_a_step_with_gradients_of_zeros_moves_what_is_frozen(megatron_fork_server, mutation, moves):
    job = megatron_fork_server.run(moved_while_frozen, world_size=1, args=[mutation])
    (moved,) = job.check().values
    assert bool(moved) == moves
