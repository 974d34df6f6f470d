# SPDX-License-Identifier: Apache-2.0
"""FULL and COMPUTE hold every bit of an operator that a step goes by."""

import pytest
import torch

from megatron_moevement.policy.job.state_recipe import Content
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

BIAS = (
    "--moe-router-score-function=sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type=none --moe-aux-loss-coeff=0"
)
SHARDED = "--use-distributed-optimizer"
JOBS = {
    "fp32": (1, "--moe-shared-expert-intermediate-size=32 --moe-shared-expert-gate"),
    "bf16-grouped": (1, f"--bf16 --moe-grouped-gemm {BIAS}"),
    "sharded-fp16": (2, f"{SHARDED} --fp16 --initial-loss-scale=1024 {BIAS}"),
    "sharded-overlap": (2, f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --bf16"),
    "pp2-tied": (2, "--pipeline-model-parallel-size=2 --bf16"),
}


def live_operators(job):
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415

    return LiveOperators(job.chunks, job.optimizer)


def dirty_each(flags):
    """Flips one tensor after the other; returns how many operators' FULL it is seen in."""
    from tests.harness.held_state import captured, equal, flip, held, train  # noqa: PLC0415

    with tiny_job(*flags) as job:
        train(job)
        live = live_operators(job)
        model, optimizers = held(job)
        stepped = {one.data_ptr() for name, one in optimizers.items() if name.endswith("stepped")}
        before = captured(live, Content.FULL)
        seen = {"state": [], "derived": [], "counters": []}
        for name, tensor in (model | optimizers).items():
            if not tensor.numel():
                continue
            flip(tensor)
            now = captured(live, Content.FULL)
            owners = sum(not equal(now[one], before[one]) for one in before)
            if name.endswith(".step"):
                seen["counters"].append(owners)
                with pytest.raises(RuntimeError, match="count different steps"):
                    job.optimizer.adam_step()
            elif name in optimizers or not isinstance(tensor, torch.nn.Parameter):
                seen["state"].append(owners)
            else:
                kind = "state" if tensor.data_ptr() in stepped else "derived"
                seen[kind].append(owners)
            flip(tensor)
        assert all(equal(now, before[one]) for one, now in captured(live, Content.FULL).items())
        return {kind: [len(counts), sorted(set(counts))] for kind, counts in seen.items()}


@pytest.mark.parametrize("name", slow_but(("bf16-grouped", "sharded-fp16", "pp2-tied"), JOBS))
def test_every_tensor_is_captured_in_the_full_state_of_one_operator(megatron_fork_server, name):
    """But for compute weights, which follow from masters, and counters: they go with scalars."""
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(dirty_each, world_size=ranks, args=[flags.split()]).check()
    for seen in job.values:
        assert seen["state"][0] > 30
        assert seen["state"][1] == [1]
        assert seen["counters"][0] > 10
        assert seen["counters"][1] == [0]
        assert seen["derived"][1] == ([] if name == "fp32" else [0])


def lose_all(flags):
    """Puts FULL back over garbage, then COMPUTE; returns the tensors that are not as before."""
    from tests.harness.held_state import held, train, wrong_after_loss  # noqa: PLC0415

    with tiny_job(*flags) as job:
        train(job)
        live = live_operators(job)
        wrong = {content: wrong_after_loss(job, live, content) for content in Content}
        model, _ = held(job)
        return [
            sorted(wrong[Content.FULL]),
            sorted(wrong[Content.COMPUTE] & model.keys()),
            len(wrong[Content.COMPUTE]),
        ]


@pytest.mark.parametrize("name", slow_but(("bf16-grouped", "sharded-fp16", "pp2-tied"), JOBS))
def test_full_brings_back_every_bit_and_compute_those_of_the_model(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(lose_all, world_size=ranks, args=[flags.split()]).check()
    for full, compute, others in job.values:
        assert (full, compute) == ([], [])
        assert others > 20  # the moments are lost


CONSTANTS = {"inv_freq"}
"""Of rotary positions: they follow from the flags."""


def plain_attributes(flags):
    """Returns the names of tensors that modules keep beside parameters and buffers."""
    from tests.harness.held_state import train  # noqa: PLC0415

    with tiny_job(*flags) as job:
        train(job)
        return sorted(
            {
                name
                for chunk in job.chunks
                for module in chunk.module.modules()
                for name, value in vars(module).items()
                if isinstance(value, torch.Tensor) and name not in CONSTANTS
            }
        )


@pytest.mark.parametrize("name", ["fp32", "bf16-grouped", "sharded-fp16"])
def test_modules_keep_no_tensor_that_is_neither_parameter_nor_buffer(megatron_fork_server, name):
    ranks, flags = JOBS[name]
    job = megatron_fork_server.run(plain_attributes, world_size=ranks, args=[flags.split()])
    assert job.check().values == ([],) * ranks


def strange_state(what):
    """Changes what the optimizer keeps of a parameter; returns how snapshots refuse it."""
    with tiny_job("--bf16") as job:
        part = job.optimizer.parts[0].optimizer
        state = part.state[part.param_groups[0]["params"][0]]
        if what == "more":
            state["max_exp_avg_sq"] = torch.zeros(1)
        elif what == "less":
            del state["exp_avg_sq"]
        else:
            state["exp_avg"] = 0.0
        with pytest.raises(AssertionError) as refused:
            live_operators(job)
        return str(refused.value)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("more", "keeps exp_avg, exp_avg_sq, master, max_exp_avg_sq, step of chunk0."),
        ("less", "keeps exp_avg, master, step of chunk0."),
        ("no tensor", "exp_avg is float, no tensor"),
    ],
)
def test_optimizer_state_that_nobody_knows_is_refused(megatron_fork_server, what, line):
    job = megatron_fork_server.run(strange_state, world_size=1, args=[what]).check()
    assert line in job.values[0]
