# SPDX-License-Identifier: Apache-2.0
"""A step is applied as a whole or not at all, and the ledger tells what it did."""

import contextlib
import math

import pytest
import torch.distributed as dist

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

BIAS = (
    "--moe-router-score-function=sigmoid",
    "--moe-router-enable-expert-bias",
    "--moe-router-load-balancing-type=none",
    "--moe-aux-loss-coeff=0",
)
HALF = ("--fp16", "--initial-loss-scale=65536", "--loss-scale-window=2")
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
SHARDED = "--use-distributed-optimizer"
JOBS = {
    "fp16, expert bias": (1, [*HALF, *BIAS, *DROPOUT]),
    "ep2, sharded": (2, [*BIAS, SHARDED, "--expert-model-parallel-size=2"]),
}


class OnPurposeError(Exception):
    """What the faults of these tests raise."""


@contextlib.contextmanager
def steps_of(job):
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with open_steps(job, build_datasets(job), START) as step:
        yield step


def observe(job, step):
    """Returns all that a commit changes, in what JSON can hold."""
    return [
        job.digests(),
        job.optimizer.scalers(),
        job.optimizer.adam_step(),
        job.scheduler.state_dict(),
        [[group.lr, group.weight_decay] for group in job.scheduler.parameter_groups()],
        job.ledger.losses(),
        [step.progress.committed, step.progress.consumed_samples, step.progress.skipped],
    ]


def fail(*_, **__):
    raise OnPurposeError


def after(function):
    """Returns a function that does the same and then fails."""

    def call(*args, **kwargs):
        function(*args, **kwargs)
        fail()

    return call


POINTS = {
    "reading the data": lambda job, step: (step, "micro_batches", fail),
    "a forward pass": lambda job, step: (job.chunks[-1].module, "forward", fail),
    "all gradients": lambda job, step: (
        job.schedule,
        "forward_backward",
        after(job.schedule.forward_backward),
    ),
    "preparing the optimizers": lambda job, step: (
        job.optimizer.parts[-1],
        "prepare_grads",
        after(job.optimizer.parts[-1].prepare_grads),
    ),
    "the gradient norm": lambda job, step: (
        job.optimizer,
        "prepare",
        after(job.optimizer.prepare),
    ),
    "the barrier": lambda job, step: (job.barrier, "wait", after(job.barrier.wait)),
}
"""Where a step can be interrupted before its commit: what to replace by something that fails."""


def interrupt_each_point(flags):
    """Interrupts the third step once at each point; returns where that changed any state."""
    changed = {}
    with tiny_job(*flags) as job, steps_of(job) as step:
        for _ in range(2):
            step.run(StopRequest.NONE)
        before = observe(job, step)
        for point, fault in POINTS.items():
            owner, name, failing = fault(job, step)
            original = getattr(owner, name)
            setattr(owner, name, failing)
            with pytest.raises(OnPurposeError):
                step.run(StopRequest.NONE)
            setattr(owner, name, original)
            changed[point] = [
                index
                for index, (one, other) in enumerate(zip(observe(job, step), before, strict=True))
                if one != other
            ]
        step.run(StopRequest.NONE)
        unequal = [one != other for one, other in zip(observe(job, step), before, strict=True)]
        return [changed, unequal[0] and unequal[-1] and unequal[-2]]


@pytest.mark.parametrize("name", JOBS)
def test_an_exception_before_the_commit_leaves_the_state_of_the_last_step(
    megatron_fork_server, name
):
    ranks, flags = JOBS[name]
    result = megatron_fork_server.run(interrupt_each_point, world_size=ranks, args=[flags])
    for changed, committed in result.check().values:
        assert changed == {point: [] for point in POINTS}
        assert committed  # what was looked at does change with a step


def poison(flags, poisoned_rank, is_expert):
    """Makes one gradient of one rank NaN in the second step."""
    from megatron_moevement.training.step import DivergenceError  # noqa: PLC0415

    with tiny_job(*flags) as job, steps_of(job) as step:
        step.run(StopRequest.NONE)
        before = observe(job, step)
        if dist.get_rank() == poisoned_rank:
            spoil_gradient(job, is_expert)
        try:
            step.run(StopRequest.NONE)
            line = None
        except DivergenceError as error:
            line = str(error)
        now = observe(job, step)
        return {"line": line, "same": [a == b for a, b in zip(now, before, strict=True)]} | {
            "skipped": step.progress.skipped,
            "found": list(job.ledger[2].found_inf) if line is None else None,
        }


def spoil_gradient(job, is_expert):
    parameters = [pair for chunk in job.chunks for pair in chunk.named_parameters()]
    weight = next(one for name, one in parameters if (".local_experts." in name) == is_expert)
    weight.register_hook(lambda gradient: gradient * math.nan)


LAYOUTS = {
    "dp2": [],
    "ep2": ["--expert-model-parallel-size=2"],
    "pp2": ["--pipeline-model-parallel-size=2"],
    "sharded": [SHARDED, "--expert-model-parallel-size=2", "--bf16"],
    "overlapped": [SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"],
}


@pytest.mark.parametrize("is_expert", [False, True])
@pytest.mark.parametrize("layout", slow_but(("pp2", "overlapped"), LAYOUTS))
def test_gradients_that_are_no_numbers_end_the_run_on_all_ranks_with_nothing_applied(
    megatron_fork_server, layout, is_expert
):
    args = [LAYOUTS[layout], 1, is_expert]
    for rank in megatron_fork_server.run(poison, world_size=2, args=args).check().values:
        assert rank["line"] == "step 2: the gradient norm is nan; the step was not applied"
        assert all(rank["same"])


def test_with_a_dynamic_loss_scale_they_skip_the_step_instead(megatron_fork_server):
    args = [[*HALF, "--expert-model-parallel-size=2"], 1, True]
    for rank in megatron_fork_server.run(poison, world_size=2, args=args).check().values:
        assert rank["line"] is None
        assert rank["found"] == [False, True]
        assert rank["skipped"] == 1
        assert rank["same"][0]  # the weights
        assert not rank["same"][-1]  # the cursor


def evaluate_between(flags, rounds):
    """Trains four steps, with evaluations after the second; returns all that steps change."""
    from megatron_moevement.training.evaluation import evaluate  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets  # noqa: PLC0415

    with tiny_job(*flags, "--eval-iters=2") as job, steps_of(job) as step:
        datasets = build_datasets(job)
        losses, unchanged = [], True
        for index in range(4):
            step.run(StopRequest.NONE)
            before = [observe(job, step), streams()]
            for _ in range(rounds if index == 1 else 0):
                losses.append(evaluate(job, datasets.valid, iterations=2, round_number=0))
                unchanged &= [observe(job, step), streams()] == before
        return [losses, unchanged, observe(job, step)]


def streams():
    """Returns the random streams of this rank in what can be compared."""
    from megatron_moevement.integrations.megatron.random_state import random_state  # noqa: PLC0415

    state = random_state()
    tensors = {"host": state["host"], **state["tracker"]}
    return [
        repr(state["python"]),
        repr(state["numpy"]),
        {name: one.tolist() for name, one in tensors.items()},
    ]


EVALUATED = JOBS | {"pp2": (2, [*BIAS, *DROPOUT, "--pipeline-model-parallel-size=2"])}


@pytest.mark.parametrize("name", slow_but(("fp16, expert bias",), EVALUATED))
def test_evaluation_changes_no_bit_and_repeats_itself(megatron_fork_server, name):
    ranks, flags = EVALUATED[name]
    with_it, without = (
        megatron_fork_server.run(evaluate_between, world_size=ranks, args=[flags, rounds])
        .check()
        .values
        for rounds in (2, 0)
    )
    for (losses, unchanged, state), (none, _, expected) in zip(with_it, without, strict=True):
        assert losses == [with_it[0][0][0]] * 2
        assert none == []
        assert unchanged
        assert state == expected


def compare_ledger(flags):
    """Trains some steps and checks each entry against what was there before and after."""
    with tiny_job(*flags) as job, steps_of(job) as step:
        found = []
        for number in range(1, 6):
            before = job.optimizer.loss_scale(), job.scheduler.parameter_groups(), streams()
            cursor = step.progress.consumed_samples
            outcome = step.run(StopRequest.NONE)
            entry = job.ledger[number]
            assert entry is outcome.entry
            assert (entry.loss_scale, entry.groups) == before[:2]
            assert entry.random_state["host"].tolist() == before[2][2]["host"]
            assert entry.scalers == job.optimizer.scalers()
            assert entry.consumed_samples == cursor
            assert job.ledger.losses()[number] == entry.loss
            factor = 1.0
            if entry.grad_norm is not None:
                factor = min(1.0, job.arguments.optimization.clip_grad / (entry.grad_norm + 1e-6))
            assert entry.clip_factor == factor
            found.append(
                [
                    entry.step,
                    entry.loss,
                    entry.num_tokens,
                    list(entry.found_inf),
                    entry.grad_norm,
                    entry.loss_scale,
                    [group.lr for group in entry.groups],
                    step.progress.skipped,
                ]
            )
        return found


def test_the_entries_of_the_ledger_are_those_of_the_steps_on_every_rank(megatron_fork_server):
    flags = ["--pipeline-model-parallel-size=2", "--fp16", "--initial-loss-scale=4194304"]
    flags += ["--hysteresis=1", "--clip-grad=0.5", "--lr-decay-style=cosine"]
    first, other = (
        megatron_fork_server.run(compare_ledger, world_size=2, args=[flags]).check().values
    )
    assert first == other
    assert [entry[0] for entry in first] == [1, 2, 3, 4, 5]
    assert all(entry[2] == 12 * 16 for entry in first)  # samples of a step x tokens of one
    skipped = [any(entry[3]) for entry in first]
    assert skipped[0]
    assert not skipped[-1]
    for index, entry in enumerate(first):
        assert (entry[4] is None) == skipped[index]
        assert entry[7] == sum(skipped[: index + 1])
        if index:  # an overflow halves the next scale and leaves the learning rate where it was
            last = first[index - 1]
            assert entry[5] == (last[5] / 2 if skipped[index - 1] else last[5])
            assert (entry[6] == last[6]) == skipped[index - 1]


def clip_with_another_norm():
    """Trains two steps with a norm that rounds otherwise on rank 1; returns state and norms."""
    with tiny_job("--clip-grad=0.01") as job:
        norm_of = job.optimizer.megatron.get_grad_norm
        factor = 1 + 2**-23 * dist.get_rank()
        job.optimizer.megatron.get_grad_norm = lambda: norm_of() * factor
        with steps_of(job) as step:
            norms = [step.run(StopRequest.NONE).entry.grad_norm.hex() for _ in range(2)]
        return [job.digests(), norms]


def test_replicas_stay_replicas_where_their_norms_round_otherwise(megatron_fork_server):
    first, second = megatron_fork_server.run(clip_with_another_norm, world_size=2).check().values
    assert first == second
