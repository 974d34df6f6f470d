# SPDX-License-Identifier: Apache-2.0
"""Grouped experts on a GPU: experts without rows, and weights multiplied where they lie."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

WIDTH, OUT = 64, 32


def passes(counts, weights):
    """Returns the output and all gradients of experts with so many rows each."""
    from megatron_moevement.integrations.megatron.grouped_experts import (  # noqa: PLC0415
        GroupedLinear,
    )

    random = torch.Generator("cuda").manual_seed(5)
    made = {"device": "cuda", "dtype": torch.bfloat16, "generator": random}
    x = torch.randn(sum(counts), WIDTH, **made).requires_grad_()
    grad = torch.randn(sum(counts), OUT, **made)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    y = GroupedLinear.apply(x, ends, *weights)
    return y.detach(), *torch.autograd.grad(y, [x, *weights], grad)


def new_weights(count):
    random = torch.Generator("cuda").manual_seed(6)
    made = {"device": "cuda", "dtype": torch.bfloat16, "generator": random}
    return [torch.randn(OUT, WIDTH, **made).requires_grad_() for _ in range(count)]


def fill_the_cache_with_nan():
    """Leaves memory that is no number where the next tensors will lie."""
    block = torch.full((1 << 24,), float("nan"), device="cuda", dtype=torch.bfloat16)
    del block


@pytest.mark.parametrize("counts", [(0, 48, 0), (0, 0, 0), (16, 0, 32)])
def test_experts_without_rows_have_gradients_of_zero(counts):
    weights = new_weights(len(counts))
    fill_the_cache_with_nan()
    y, grad_x, *gradients = passes(counts, weights)
    assert y.shape == (sum(counts), OUT)
    assert grad_x.shape == (sum(counts), WIDTH)
    for rows, gradient in zip(counts, gradients, strict=True):
        assert gradient.isfinite().all()
        assert bool(gradient.any()) == (rows > 0)


def test_weights_at_equal_distances_give_the_bits_of_their_copy():
    counts, apart = (16, 8, 24), new_weights(3)
    step = OUT * WIDTH + 128
    memory = torch.zeros(3 * step, device="cuda", dtype=torch.bfloat16)
    together = []
    for index, weight in enumerate(apart):
        place = memory[index * step : index * step + weight.numel()].view(OUT, WIDTH)
        together.append(place.copy_(weight.detach()).detach().requires_grad_())
    for one, other in zip(passes(counts, together), passes(counts, apart), strict=True):
        assert torch.equal(one, other)
