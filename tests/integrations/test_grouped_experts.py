# SPDX-License-Identifier: Apache-2.0
"""Grouped experts compute what sequential experts compute, with the same parameters."""

import contextlib
from unittest import mock

import pytest
import torch

from tests.harness.tiny_job import PLAIN, TINY, tiny_job

pytestmark = pytest.mark.distributed

GROUPED = "--moe-grouped-gemm"
SHARDED = "--use-distributed-optimizer"
NETWORKS = {
    "swiglu": (TINY, ()),
    "gelu": (PLAIN, ("--num-experts=4", "--disable-bias-linear")),
    "squared-relu": (PLAIN, ("--num-experts=4", "--disable-bias-linear", "--squared-relu")),
    "wide": (TINY, ("--moe-ffn-hidden-size=80", "--num-experts=6")),
}
TOKENS = {
    "even": (0.25, 0.25, 0.25, 0.25),
    "uneven": (0.5, 0.125, 0.3125, 0.0625),
    "some-without": (0.0, 0.75, 0.0, 0.25),
    "all-to-one": (0.0, 0.0, 1.0, 0.0),
}
ROWS = 48


def experts_of(job):
    from megatron_moevement.integrations.megatron.grouped_experts import (  # noqa: PLC0415
        GroupedExperts,
    )

    (chunk,) = job.chunks
    return next(module for module in chunk.modules() if isinstance(module, GroupedExperts))


def inputs(experts, tokens, rows=ROWS):
    """Returns rows for the experts, how many each gets, their weights, and output gradients."""
    dtype = next(experts.parameters()).dtype
    generator = torch.Generator().manual_seed(7)
    hidden = experts.config.hidden_size
    x = torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(rows, generator=generator).requires_grad_()
    grad = torch.randn(rows, hidden, generator=generator).to(dtype)
    counts = torch.zeros(experts.num_local_experts, dtype=torch.int64)
    counts[: len(tokens)] = (torch.tensor(tokens) * rows).round().long()
    assert int(counts.sum()) == rows
    return x, counts, probs, grad


def results(forward, experts, x, counts, probs, grad):
    """Returns output and gradients by name; None where there is no gradient."""
    output, bias = forward(x, counts, probs)
    assert bias is None
    wanted = {"x": x, "probs": probs}
    wanted |= {name: one for name, one in experts.named_parameters() if one.requires_grad}
    grads = torch.autograd.grad(output, list(wanted.values()), grad, allow_unused=True)
    return {"output": output.detach()} | dict(zip(wanted, grads, strict=True))


def distance(one, other):
    return ((one - other).norm() / other.norm().clamp_min(1e-30)).item()


def compare(base, flags, relative):
    """Compares the two ways to compute the same experts; returns gradients that are all zero."""
    with tiny_job(*flags, GROUPED, base=base) as job:
        experts = experts_of(job)
        return {name: compare_on(experts, TOKENS[name], relative) for name in TOKENS}


def compare_on(experts, tokens, relative):
    from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: PLC0415

    given = inputs(experts, tokens)
    grouped = results(experts, experts, *given)
    sequential = results(lambda *rows: SequentialMLP.forward(experts, *rows), experts, *given)
    assert grouped.keys() == sequential.keys()
    for name, expected in sequential.items():
        assert grouped[name].dtype == expected.dtype, name
        assert grouped[name].shape == expected.shape, name
        assert distance(grouped[name].float(), expected.float()) <= relative, name
    return sorted(name for name, grad in grouped.items() if not grad.any())


@pytest.mark.parametrize("network", NETWORKS)
def test_output_and_all_gradients_agree_to_rounding(megatron_fork_server, network):
    base, flags = NETWORKS[network]
    args = [list(base), list(flags), 1e-6]
    (zero,) = megatron_fork_server.run(compare, world_size=1, args=args).check().values
    count = 6 if network == "wide" else 4
    for name, tokens in TOKENS.items():
        idle = [one for one in range(count) if one >= 4 or not tokens[one]]
        assert zero[name] == sorted(
            f"local_experts.{one}.linear_fc{layer}.weight" for one in idle for layer in (1, 2)
        )


def test_in_bf16_they_agree_to_its_rounding(megatron_fork_server):
    args = [list(TINY), ["--bf16"], 2.0**-7]
    megatron_fork_server.run(compare, world_size=1, args=args).check()


def compute_nothing():
    with tiny_job(GROUPED) as job:
        experts = experts_of(job)
        grads = results(experts, experts, *inputs(experts, (0.0,), rows=0))
        return [list(grads["output"].shape), any(grad.any().item() for grad in grads.values())]


def test_without_any_tokens_the_gradients_are_zero(megatron_fork_server):
    (value,) = megatron_fork_server.run(compute_nothing, world_size=1).check().values
    assert value == [[0, 32], False]


def freeze(frozen):
    """Freezes experts; returns which parameters got no gradient and which bits changed."""
    with tiny_job(GROUPED) as job:
        experts = experts_of(job)
        given = inputs(experts, TOKENS["uneven"])
        before = results(experts, experts, *given)
        for index in frozen:
            experts.local_experts[index].requires_grad_(False)
        after = results(experts, experts, *given)
        changed = [name for name in after if not torch.equal(after[name], before[name])]
        return [sorted(before.keys() - after.keys()), changed]


@pytest.mark.parametrize("frozen", [[0], [1, 3], [0, 1, 2, 3]])
def test_frozen_experts_get_no_gradient_and_no_other_bit_changes(megatron_fork_server, frozen):
    result = megatron_fork_server.run(freeze, world_size=1, args=[frozen]).check()
    without = [f"local_experts.{one}.linear_fc{layer}.weight" for one in frozen for layer in (1, 2)]
    assert result.values == ([without, []],)


def describe(flags):
    """Returns names and shapes of the parameters, and the names in a checkpoint."""
    with tiny_job(*flags) as job:
        (chunk,) = job.chunks
        parameters = {name: list(one.shape) for name, one in chunk.named_parameters()}
        return [parameters, sorted(chunk.module.sharded_state_dict())]


def test_names_shapes_and_checkpoints_are_those_of_sequential_experts(megatron_fork_server):
    sequential, grouped = (
        megatron_fork_server.run(describe, world_size=1, args=[flags]).check().values
        for flags in ([], [GROUPED])
    )
    assert grouped == sequential
    names = [name for name in grouped[0][0] if ".experts." in name]
    assert len(names) == 2 * 4 * 2  # layers, experts, weights: one parameter for each


def grouped_experts():
    from megatron_moevement.integrations.megatron import grouped_experts as module  # noqa: PLC0415

    return module


@contextlib.contextmanager
def gpu_kernel():
    """Puts a stub in place of the grouped product that does what CUDA's may: no rows are refused,
    and the weight gradients of an expert without rows stay as its memory was.
    """
    module = grouped_experts()
    product = module.grouped_mm

    def strict(rows, matrices, *, offs):
        if 0 in (*rows.shape, *matrices.shape):
            raise RuntimeError("strides should be multiple of 16 bytes")
        result = product(rows, matrices, offs=offs)
        if matrices.dim() == 2:
            result[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = float("nan")
        return result

    with (
        mock.patch.object(module, "grouped_mm", strict),
        mock.patch.object(module, "_leaves_empty_groups", return_value=True),
    ):
        yield


def compute_as_on_a_gpu(tokens, rows):
    """Returns which results are not, bit for bit, those of the host's kernel."""
    with tiny_job(GROUPED) as job:
        experts = experts_of(job)
        given = inputs(experts, tokens, rows)
        expected = results(experts, experts, *given)
        with gpu_kernel():
            found = results(experts, experts, *given)
        return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [((0.0,), 0), (TOKENS["some-without"], ROWS), (TOKENS["all-to-one"], ROWS)],
)
def test_experts_without_rows_have_no_gradient_whatever_a_kernel_leaves(
    megatron_fork_server, tokens, rows
):
    args = [list(tokens), rows]
    assert megatron_fork_server.run(
        compute_as_on_a_gpu, world_size=1, args=args
    ).check().values == ([],)


def where_weights_lie(flags, as_on_a_gpu):
    """Returns how many expert layers take their weights where they are, of how many."""
    module = grouped_experts()
    is_on_gpu = mock.patch.object(module, "_is_on_gpu", return_value=as_on_a_gpu)
    with is_on_gpu, tiny_job(GROUPED, *flags) as job:
        layers = [
            experts._weights(linear)
            for experts in job.chunks[0].modules()
            if isinstance(experts, module.GroupedExperts)
            for linear in ("linear_fc1", "linear_fc2")
        ]
        together = [module._side_by_side(weights) for weights in layers]
        assert all(
            torch.equal(one, torch.stack(weights))
            for one, weights in zip(together, layers, strict=True)
        )
        names = [name for name, _ in job.chunks[0].named_parameters() if ".experts." in name]
        in_place = [
            one.data_ptr() == weights[0].data_ptr()
            for one, weights in zip(together, layers, strict=True)
        ]
        return [sum(in_place), len(layers), names == sorted(names)]


@pytest.mark.parametrize(
    ("flags", "as_on_a_gpu", "in_place"),
    [
        ([], False, 4),
        (["--bf16"], False, 4),
        ([SHARDED, "--bf16"], True, 4),
        ([SHARDED, "--bf16"], False, 0),  # where the order of buffers decides bits
    ],
)
def test_the_weights_of_a_layer_are_multiplied_where_they_lie(
    megatron_fork_server, flags, as_on_a_gpu, in_place
):
    args = [flags, as_on_a_gpu]
    result = megatron_fork_server.run(where_weights_lie, world_size=1, args=args).check()
    assert result.values == ([in_place, 4, True],)


def test_weights_that_do_not_lie_at_equal_distances_are_copied():
    memory = torch.arange(40.0)
    module = grouped_experts()
    for starts in ([0, 8, 20], [20, 10, 0], [0, 3, 6], [0, 0, 0]):
        weights = [memory[start : start + 6].view(2, 3) for start in starts]
        together = module._side_by_side(weights)
        assert torch.equal(together, torch.stack(weights))
        assert together.data_ptr() != memory.data_ptr()
    apart = [torch.ones(2, 3), torch.zeros(2, 3)]
    assert torch.equal(module._side_by_side(apart), torch.stack(apart))
    lie = [memory[start : start + 6].view(2, 3) for start in (1, 9, 17)]
    assert module._side_by_side(lie).data_ptr() == lie[0].data_ptr()
    assert torch.equal(module._side_by_side(lie), torch.stack(lie))
