"""A step with frozen operators: nothing else changes a bit, and nothing of theirs changes at all."""

import contextlib

import pytest
import torch

from megatron_moevement.runtime.commit_barrier import StopRequest
from megatron_moevement.testing.tiny_job import PLAIN, TINY, tiny_job
from megatron_moevement.training.step import START

pytestmark = pytest.mark.distributed

GROUPED = "--moe-grouped-gemm"
SHARDED = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce"
OVERLAPPED = (SHARDED, OVERLAP, "--overlap-param-gather")
PP2 = "--pipeline-model-parallel-size=2"
EP2 = "--expert-model-parallel-size=2"
BIAS = (
    "--moe-router-score-function=sigmoid",
    "--moe-router-enable-expert-bias",
)
DROPOUT = ("--attention-dropout=0.1", "--hidden-dropout=0.1")
SHARED = ("--moe-shared-expert-intermediate-size=32", "--moe-shared-expert-gate")
RECOMPUTE = (
    "--recompute-granularity=full",
    "--recompute-method=uniform",
    "--recompute-num-layers=1",
)
MODULES = ("--recompute-modules", "core_attn", "moe", "shared_experts")
JOBS = {
    "fp32": (1, TINY, [*DROPOUT]),
    "bf16": (1, TINY, ["--bf16", *SHARED, "--qk-layernorm", "--add-qkv-bias"]),
    "fp16": (1, TINY, ["--fp16", "--initial-loss-scale=1024", *BIAS]),
    "grouped": (1, TINY, [GROUPED, "--untie-embeddings-and-output-weights"]),
    "grouped-bf16": (1, TINY, [GROUPED, "--bf16"]),
    "recompute": (1, TINY, [*RECOMPUTE, *DROPOUT]),
    "recompute-selective": (1, TINY, ["--recompute-granularity=selective", *MODULES, *BIAS]),
    "biases": (1, PLAIN, []),
    "ep2": (2, TINY, [EP2, GROUPED, "--bf16", *BIAS]),
    "ep2-sharded-fp16": (2, TINY, [EP2, SHARDED, "--fp16", "--initial-loss-scale=1024"]),
    "pp2-tied": (2, TINY, [PP2, "--bf16", *DROPOUT]),
    "vpp2": (2, TINY, [PP2, "--num-layers=4", "--num-virtual-stages-per-pipeline-rank=2"]),
    "dp3": (3, TINY, [OVERLAP, "--ddp-bucket-size=5000"]),
    "dp3-sharded": (3, TINY, [*OVERLAPPED, "--bf16", "--ddp-bucket-size=5000"]),
    "tp2": (2, TINY, ["--tensor-model-parallel-size=2", "--sequence-parallel", "--bf16"]),
    "tp4": (4, TINY, ["--tensor-model-parallel-size=4", "--sequence-parallel", "--qk-layernorm"]),
    "tp2-dense": (2, PLAIN, ["--tensor-model-parallel-size=2", *OVERLAPPED]),
}


@contextlib.contextmanager
def frozen_step(base, flags):
    """Yields a job after two steps, ready to repeat the third."""
    from megatron_moevement.testing.frozen_step import FrozenStep  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with (
        tiny_job(*flags, "--clip-grad=0.1", base=base) as job,
        open_steps(job, build_datasets(job), START) as step,
    ):
        for _ in range(2):
            step.run(StopRequest.NONE)
        yield FrozenStep(job, step._micro_batches())


def compare(step, expected, active):
    """Repeats the step with the rest frozen; returns what differs, by what it is."""
    from megatron_moevement.testing.frozen_step import differences  # noqa: PLC0415

    own = step.freezing.operators
    frozen = own - active
    step.restore(poisoned=frozen)
    before = step._state()
    seen = step.run(active, expected.statistics)
    found = {
        "loss": [] if seen.loss == expected.loss else ["loss"],
        "sent": differences(seen.sent, expected.sent),
        "random": [] if repr(seen.random) == repr(expected.random) else ["random"],
        "scalers": [] if seen.scalers == expected.scalers else ["scalers"],
        "gradient": [
            name
            for one in sorted(own & active)
            for name in differences(seen.gradients[one], expected.gradients[one])
        ],
        "state": [
            name
            for one in sorted(own & active)
            for name in differences(seen.state[one], expected.state[one])
        ],
        "frozen": [
            name
            for one in sorted(frozen)
            for name in differences(without_bias(seen.state[one]), without_bias(before[one]))
        ],
    }
    return {what: names for what, names in found.items() if names}, seen


def without_bias(values):
    """Leaves out what follows from the forward pass, whatever is trained."""
    return {name: one for name, one in values.items() if not name.endswith("expert_bias")}


def freeze_at_random(base, flags, seeds):
    with frozen_step(base, flags) as step:
        from megatron_moevement.testing.frozen_step import random_active  # noqa: PLC0415

        operators = step.operators()
        expected = step.run(frozenset(operators))
        found = {}
        for seed in seeds:
            found[str(seed)], _ = compare(step, expected, random_active(operators, seed))
        found["none active"], _ = compare(step, expected, frozenset())
        return found


@pytest.mark.parametrize("name", JOBS)
def test_nothing_else_changes_a_bit_and_nothing_frozen_changes_at_all(megatron_fork_server, name):
    ranks, base, flags = JOBS[name]
    args = [list(base), flags, [1, 2, 3]]
    for found in megatron_fork_server.run(freeze_at_random, world_size=ranks, args=args).check().values:
        assert found == dict.fromkeys(found, {})
