# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step in three parts is the upstream step, and each part does only its own."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

STEPS = 6
EP2 = ("--expert-model-parallel-size=2",)  # so that the experts have an optimizer of their own
PRECISIONS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16", "--initial-loss-scale=4194304", "--loss-scale-window=3", "--hysteresis=1"],
}
KINDS = {
    "whole": [],
    "sharded": ["--use-distributed-optimizer"],
    "overlapped": [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ],
}
BIAS = [
    "--moe-router-score-function=sigmoid",
    "--moe-router-enable-expert-bias",
    "--moe-router-load-balancing-type=none",
    "--moe-aux-loss-coeff=0",
]
FLAGS = ["--lr-warmup-iters=2", "--lr-decay-style=cosine", "--clip-grad=0.5"]


@contextlib.contextmanager
def steps_of(job):
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with open_steps(job, build_datasets(job), START) as step:
        yield step


def compute_gradients(job, step):
    return job.schedule.forward_backward(step.micro_batches())


def observe(job):
    """Returns everything that a commit may change."""
    assert job.optimizer.first_adam_step() == job.optimizer.adam_step()
    return [job.digests(), job.optimizer.scalers(), job.optimizer.adam_step()]


def main_gradients(job):
    """Returns the gradient of every parameter of the model that this rank steps whole."""
    return [one.main_grad for chunk in job.chunks for one in chunk.parameters()]


def take_apart(flags):
    """Returns whether `prepare` and `commit` changed state, and what became of the scale."""
    with tiny_job(*flags) as job, steps_of(job) as step:
        compute_gradients(job, step)
        before = observe(job)
        statistics = job.optimizer.prepare()
        prepared = observe(job)
        applied = job.optimizer.commit(statistics)
        job.optimizer.gather()
        after = observe(job)
        return {
            "prepare changes": prepared != before,
            "applied": applied,
            "learned": all(after[0][name] != before[0][name] for name in before[0]),
            "any learned": after[0] != before[0],
            "scales": [[one and one["scale"] for one in state[1]] for state in (before, after)],
            "adam": [before[2], after[2]],
            "found": list(statistics.found_inf),
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", slow_but(("fp16",), PRECISIONS))
def test_preparing_changes_no_state_and_committing_all_of_it(megatron_fork_server, kind, precision):
    args = [[*KINDS[kind], *PRECISIONS[precision], "--initial-loss-scale=65536"]]
    for rank in megatron_fork_server.run(take_apart, world_size=2, args=args).check().values:
        assert not rank["prepare changes"]
        assert rank["applied"]
        assert rank["learned"]
        assert rank["adam"] == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_skips_all_optimizers_and_moves_the_scale_at_the_commit(
    megatron_fork_server, kind
):
    flags = [*KINDS[kind], *PRECISIONS["fp16"], "--initial-loss-scale=4294967296", *EP2]
    for rank in megatron_fork_server.run(take_apart, world_size=2, args=[flags]).check().values:
        assert rank["found"] == [True, True]  # the dense part and the experts
        assert not rank["prepare changes"]
        assert not rank["applied"]
        assert not rank["any learned"]
        assert rank["scales"] == [[2.0**32] * 2, [2.0**31] * 2]
        assert rank["adam"] == [0, 0]


def overflow_in_one_part(is_expert):
    """Makes one gradient of one part infinite; returns what the two parts found and did."""
    flags = [*EP2, *PRECISIONS["fp16"], "--initial-loss-scale=1024"]
    with tiny_job(*flags) as job, steps_of(job) as step:
        compute_gradients(job, step)
        poisoned = next(
            one
            for chunk in job.chunks
            for one in chunk.parameters()
            if getattr(one, "allreduce", True) != is_expert
        )
        poisoned.main_grad.view(-1)[-1] = math.inf
        before = observe(job)
        statistics = job.optimizer.prepare()
        applied = job.optimizer.commit(statistics)
        after = observe(job)
        return {
            "found": list(statistics.found_inf),
            "norm": statistics.norm,
            "applied": applied,
            "learned": before[0] != after[0],
            "scales": [one["scale"] for one in after[1]],
        }


@pytest.mark.parametrize("is_expert", [False, True])
def test_an_overflow_of_one_part_skips_the_other_and_keeps_its_scale(
    megatron_fork_server, is_expert
):
    job = megatron_fork_server.run(overflow_in_one_part, world_size=2, args=[is_expert])
    for rank in job.check().values:
        assert rank["found"] == [not is_expert, is_expert]
        assert rank["norm"] is None
        assert not rank["applied"]
        assert not rank["learned"]
        assert rank["scales"] == ([1024.0, 512.0] if is_expert else [512.0, 1024.0])


_KINDS = ("reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "barrier")
COLLECTIVES = [
    name
    for name in vars(dist.ProcessGroup)
    if any(kind in name for kind in (*_KINDS, "send", "recv"))
]


@contextlib.contextmanager
def no_collectives():
    """Makes every collective of every group raise, wherever it is called from."""

    def refuse(*_, **__):
        raise AssertionError("a collective")

    before = {name: vars(dist.ProcessGroup)[name] for name in COLLECTIVES}
    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, refuse)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def commit_alone(flags):
    """Commits while collectives are forbidden; returns which other parts of a step need them."""
    with tiny_job(*flags) as job, steps_of(job) as step:
        compute_gradients(job, step)
        needed = {}
        with no_collectives():
            needed["prepare"] = needs_collectives(job.optimizer.prepare)
        statistics = job.optimizer.prepare()
        with no_collectives():
            job.optimizer.commit(statistics)
            needed["gather"] = needs_collectives(job.optimizer.gather)
        dist.barrier()
        return needed


def needs_collectives(action):
    try:
        action()
    except AssertionError as error:
        assert str(error) == "a collective"  # noqa: PT017  (asserts what was raised, not that)
        return True
    return False


@pytest.mark.parametrize("precision", slow_but(("fp16",), ("bf16", "fp16")))
@pytest.mark.parametrize("kind", KINDS)
def test_the_commit_makes_no_collective(megatron_fork_server, kind, precision):
    flags = ["--bf16"] if precision == "bf16" else ["--fp16", "--initial-loss-scale=4294967296"]
    job = megatron_fork_server.run(commit_alone, world_size=2, args=[[*KINDS[kind], *flags]])
    for needed in job.check().values:
        assert needed == {"prepare": True, "gather": kind == "sharded"}


def commit_steps_alone(flags):
    """Trains steps whose whole commit is forbidden to make a collective."""
    with tiny_job(*flags) as job, steps_of(job) as step:
        commit = step._commit

        def alone(*args):
            with no_collectives():
                return commit(*args)

        step._commit = alone
        for _ in range(3):
            step.run(StopRequest.NONE)
        return [step.progress.committed, step.progress.skipped]


def test_neither_do_expert_bias_schedules_and_ledger(megatron_fork_server):
    flags = [*EP2, *KINDS["sharded"], *PRECISIONS["fp16"], *BIAS, "--initial-loss-scale=1024"]
    job = megatron_fork_server.run(commit_steps_alone, world_size=2, args=[flags])
    assert job.check().values == ([3, 0], [3, 0])


def clip(limit):
    """Returns norm, factor and whether the gradients that Adam took were scaled by the factor."""
    with tiny_job(f"--clip-grad={limit}") as job, steps_of(job) as step:
        compute_gradients(job, step)
        before = [grad.clone() for grad in main_gradients(job)]
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in before))
        statistics = job.optimizer.prepare()
        factor = job.optimizer.clip_factor(statistics)
        job.optimizer.commit(statistics)
        scaled = [
            torch.equal(grad, was if factor == 1.0 else was * factor)
            for grad, was in zip(main_gradients(job), before, strict=True)
        ]
        return [statistics.norm, norm, factor, all(scaled)]


@pytest.mark.parametrize("limit", [0.25, 1000.0, 0.0])
def test_gradients_are_clipped_by_the_factor_that_is_written_down(megatron_fork_server, limit):
    (value,) = megatron_fork_server.run(clip, world_size=1, args=[limit]).check().values
    reported, norm, factor, scaled = value
    assert reported == pytest.approx(norm, rel=1e-6)
    assert factor == (limit / (reported + 1e-6) if limit == 0.25 else 1.0)
    assert scaled


def parameters_around_gather(flags):
    """Returns the bits of the compute weights before and after the gather, as text."""
    with tiny_job(*flags) as job, steps_of(job) as step:
        compute_gradients(job, step)
        job.optimizer.commit(job.optimizer.prepare())
        committed = weights(job)
        job.optimizer.gather()
        gathered = weights(job)
        job.optimizer.complete_parameters()
        return [committed, gathered, weights(job)]


def weights(job):
    import hashlib  # noqa: PLC0415

    digest = hashlib.sha256()
    for chunk in job.chunks:
        for one in chunk.parameters():
            digest.update(one.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_gather_all_replicas_have_all_weights(megatron_fork_server, kind):
    flags = [*KINDS[kind], "--bf16"]
    job = megatron_fork_server.run(parameters_around_gather, world_size=2, args=[flags])
    one, other = job.check().values
    equal = [mine == theirs for mine, theirs in zip(one, other, strict=True)]
    assert (
        equal
        == {
            "whole": [True, True, True],
            "sharded": [False, True, True],  # at the commit each replica has its own shard
            "overlapped": [False, False, True],  # the next forward pass gathers, or whoever reads
        }[kind]
    )


def train_split(flags):
    with tiny_job(*FLAGS, *flags) as job, steps_of(job) as step:
        entries = [step.run(StopRequest.NONE).entry for _ in range(STEPS)]
        return [
            [entry.loss for entry in entries],
            [entry.grad_norm for entry in entries],
            *observe(job),
            step.progress.skipped,
        ]


def train_upstream(flags):
    """Trains with upstream's own step and scaler."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler  # noqa: PLC0415

    with tiny_job(*FLAGS, *flags) as job, steps_of(job) as step:
        for part in job.optimizer.parts:
            if getattr(part, "grad_scaler", None) is not None:
                part.grad_scaler.__class__ = DynamicGradScaler
        losses, norms, skipped = [], [], 0
        for _ in range(STEPS):
            loss = compute_gradients(job, step)
            applied, norm, _ = job.optimizer.megatron.step()
            if applied:
                job.scheduler.advance(job.batches.global_batch_size)
            losses.append(loss.mean)
            norms.append(norm)
            skipped += not applied
        return [losses, norms, *observe(job), skipped]


FAST = {("sharded", "fp16"), ("overlapped", "bf16")}
PAIRS = [
    pytest.param(
        kind,
        precision,
        marks=[] if (kind, precision) in FAST else [pytest.mark.slow],
    )
    for kind in KINDS
    for precision in PRECISIONS
]


@pytest.mark.parametrize(("kind", "precision"), PAIRS)
def test_the_three_parts_together_are_upstreams_step_bit_for_bit(
    megatron_fork_server, kind, precision
):
    flags = [*EP2, *KINDS[kind], *PRECISIONS[precision]]
    split, upstream = (
        megatron_fork_server.run(train, world_size=2, args=[flags]).check().values
        for train in (train_split, train_upstream)
    )
    assert split == upstream
    skipped = split[0][-1]
    assert 0 < skipped < STEPS if precision == "fp16" else skipped == 0
