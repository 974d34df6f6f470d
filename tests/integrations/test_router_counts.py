# SPDX-License-Identifier: Apache-2.0
"""What Megatron's routers send to each expert is counted once, and in training alone."""

import contextlib
import functools

import pytest

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.tiny_job import TINY, tiny_job

pytestmark = pytest.mark.distributed

PROTECTED = "--moevement-strategy=moevement"
FULL = (
    "--recompute-granularity=full",
    "--recompute-method=uniform",
    "--recompute-num-layers=1",
)
SELECTIVE = ("--recompute-granularity=selective", "--recompute-modules", "core_attn", "moe")
FREQUENCY = ("--num-layers=4", "--moe-layer-freq=[0,1,0,1]")
STEPS = 3


def observed(job):
    """Returns what routers did where gradients are wanted, by layer, taken from their own maps."""
    import torch  # noqa: PLC0415

    found = {}

    def note(router, _, routed):
        if torch.is_grad_enabled():
            own = found.setdefault(router.layer_number - 1, [])
            own.append([routed[1].sum(dim=0).tolist(), routed[0].double().sum(dim=0).tolist()])

    for chunk in job.chunks:
        for module in chunk.modules():
            if type(module).__name__ == "TopKRouter":
                module.register_forward_hook(note)
    return found


def count(flags, evaluates, interrupted):
    """Trains some steps; returns the reduced counts, those of each router, tokens of a step."""
    from megatron_moevement.training.evaluation import evaluate  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with (
        tiny_job(PROTECTED, "--moevement-order=hard", *flags, base=TINY) as job,
        contextlib.ExitStack() as stack,
    ):
        datasets = build_datasets(job)
        step = stack.enter_context(open_steps(job, datasets, START))
        found = observed(job)
        for number in range(STEPS):
            step.run(StopRequest.NONE)
            if evaluates:
                before = {layer: list(own) for layer, own in found.items()}
                evaluate(job, datasets.valid, iterations=1, round_number=number)
                assert found == before
        if interrupted:
            with open_steps(job, datasets, START) as other:
                job.schedule.forward_backward(other.micro_batches(), lambda point: None, STEPS + 1)
            job.transients.reset()
        counts = job.router_counts
        missing = [counts.reduced(range(1, STEPS)), counts.reduced(range(2, STEPS + 1))]
        tokens = job.batches.global_batch_size * int(job.arguments.data.seq_length)
        return {
            "counts": counts.reduced(range(1, STEPS + 1)),
            "missing": missing,
            "routers": found,
            "tokens": tokens * job.arguments.moe.moe_router_topk * STEPS,
        }


@pytest.fixture(scope="module")
def counted(megatron_fork_server):
    """Returns what the ranks of a job counted; the same call is made once."""

    @functools.cache
    def run(world_size, *flags, evaluates=False, interrupted=False):
        arguments = [list(flags), evaluates, interrupted]
        job = megatron_fork_server.run(count, world_size=world_size, args=arguments)
        return job.check().values

    return run


def by_layer(values, part, experts=4):
    """Returns what all routers of a job did, by layer and number."""
    sums = {}
    for value in values:
        for layer, passes in value["routers"].items():
            own = sums.setdefault(int(layer), [0] * experts)
            for one in passes:
                own[:] = [before + more for before, more in zip(own, one[part], strict=True)]
    return [number for layer in sorted(sums) for number in sums[layer]]


LAYOUTS = {
    "alone": (1,),
    "without experts in each layer": (1, *FREQUENCY),
    "ep2 and pp2": (4, "--expert-model-parallel-size=2", "--pipeline-model-parallel-size=2"),
    "tp2": (2, "--tensor-model-parallel-size=2", "--sequence-parallel", "--bf16"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_come_to_what_all_routers_did(counted, name):
    values = counted(*LAYOUTS[name])
    assert {tuple(value["counts"]) for value in values} == {tuple(by_layer(values, 0))}
    layers = len({layer for value in values for layer in value["routers"]})
    assert sum(values[0]["counts"]) == layers * values[0]["tokens"]
    assert all(value["missing"] == [None, None] for value in values)


@pytest.mark.parametrize("flags", [FULL, SELECTIVE], ids=["full", "selective"])
def test_a_layer_that_is_computed_again_is_counted_once(counted, flags):
    (plain,), (again,) = counted(1), counted(1, *flags)
    assert again["counts"] == plain["counts"]


def test_evaluation_counts_nothing(counted):
    (plain,), (evaluated,) = counted(1), counted(1, "--eval-iters=1", evaluates=True)
    assert evaluated["counts"] == plain["counts"]


def test_neither_does_a_step_that_was_not_committed(counted):
    (plain,), (interrupted,) = counted(1), counted(1, interrupted=True)
    assert interrupted["counts"] == plain["counts"]


def test_soft_counts_are_sums_of_probabilities(counted):
    (value,) = counted(1, "--moevement-order=soft")
    sums = by_layer([value], 1)
    passes = sum(map(len, value["routers"].values()))
    for found, expected in zip(value["counts"], sums, strict=True):
        assert abs(found / 2**16 - expected) < passes * 2**-10


def test_by_index_nothing_is_counted(counted):
    (value,) = counted(1, "--moevement-order=index")
    assert set(value["counts"]) == {0}
