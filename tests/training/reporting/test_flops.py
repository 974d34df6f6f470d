# SPDX-License-Identifier: Apache-2.0
"""Operations are those of the matrix products that a training step runs."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_moevement.settings.architecture import Architecture, MixtureOfExperts
from megatron_moevement.training.reporting.flops import flops_per_iteration

SEQ, WIDTH, HEADS, GROUPS, HEAD_WIDTH = 12, 32, 4, 2, 16
DENSE, EXPERT, SHARED, TOP_K, VOCAB = 48, 20, 24, 2, 96
ARCHITECTURE = Architecture(
    num_layers=2,
    hidden_size=WIDTH,
    ffn_hidden_size=DENSE,
    num_attention_heads=HEADS,
    kv_channels=HEAD_WIDTH,
    group_query_attention=True,
    num_query_groups=GROUPS,
    swiglu=True,
)
MOE = MixtureOfExperts(
    num_experts=8,
    moe_layer_freq=(0, 1),
    moe_ffn_hidden_size=EXPERT,
    moe_shared_expert_intermediate_size=SHARED,
    moe_router_topk=TOP_K,
)


def _flops(architecture: Architecture, moe: MixtureOfExperts, batch: int = 3) -> int:
    return flops_per_iteration(
        architecture, moe, padded_vocab_size=VOCAB, seq_length=SEQ, global_batch_size=batch
    )


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def _mlp(x: torch.Tensor, inner: int, tokens: int) -> torch.Tensor:
    """A gated MLP on so many tokens, however they came to it."""
    x = x.flatten(0, 1).repeat(tokens // x.shape[0] // x.shape[1], 1)
    return (torch.nn.functional.silu(x @ _weight(WIDTH, inner)) * (x @ _weight(WIDTH, inner))) @ (
        _weight(inner, WIDTH)
    )


def _attention(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = x.shape[0]
    q = (x @ _weight(WIDTH, HEADS * HEAD_WIDTH)).view(batch, SEQ, HEADS, HEAD_WIDTH)
    k, v = (
        (x @ _weight(WIDTH, GROUPS * HEAD_WIDTH))
        .view(batch, SEQ, GROUPS, HEAD_WIDTH)
        .repeat_interleave(HEADS // GROUPS, dim=2)
        for _ in range(2)
    )
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    mixed = scores.softmax(-1) @ v.transpose(1, 2)
    return mixed.transpose(1, 2).flatten(2) @ _weight(HEADS * HEAD_WIDTH, WIDTH), mixed


def test_the_count_is_that_of_a_forward_and_backward_pass_of_the_same_products():
    batch = 3
    with FlopCounterMode(display=False) as counter:
        x = torch.randn(batch, SEQ, WIDTH, requires_grad=True)
        losses = [(x @ _weight(WIDTH, VOCAB)).sum()]
        for _ in range(2):
            losses.append(_attention(x)[0].sum())
        losses.append(_mlp(x, DENSE, batch * SEQ).sum())
        losses.append(_mlp(x, EXPERT, TOP_K * batch * SEQ).sum())
        losses.append(_mlp(x, SHARED, batch * SEQ).sum())
        sum(losses).backward()
    # Half of each attention matrix is masked; the counter sees the whole.
    masked = 2 * 3 * (2 * 2 * batch * HEADS * SEQ * SEQ * HEAD_WIDTH) // 2
    assert _flops(ARCHITECTURE, MOE, batch) == counter.get_total_flops() - masked


def test_a_dense_model_has_no_experts():
    dense = _flops(ARCHITECTURE, MixtureOfExperts())
    every_layer = dataclasses.replace(MOE, moe_layer_freq=(0, 0))
    assert dense == _flops(ARCHITECTURE, every_layer)


def test_experts_that_no_token_visits_cost_nothing():
    assert _flops(ARCHITECTURE, MOE) == _flops(
        ARCHITECTURE, dataclasses.replace(MOE, num_experts=64)
    )


def test_the_gate_of_swiglu_is_a_third_product():
    plain = dataclasses.replace(ARCHITECTURE, swiglu=False)
    per_token = WIDTH * (DENSE + TOP_K * EXPERT + SHARED)
    assert _flops(ARCHITECTURE, MOE) - _flops(plain, MOE) == 6 * 3 * SEQ * per_token


@pytest.mark.parametrize("batch", [1, 5])
def test_operations_grow_with_the_batch(batch):
    assert _flops(ARCHITECTURE, MOE, batch) == batch * _flops(ARCHITECTURE, MOE, 1)


def test_defaults_are_those_of_the_model():
    by_default = dataclasses.replace(ARCHITECTURE, ffn_hidden_size=None, kv_channels=None)
    mlp = 64  # two thirds of 4 x 32, in steps of 64
    given = dataclasses.replace(by_default, ffn_hidden_size=mlp, kv_channels=WIDTH // HEADS)
    experts = dataclasses.replace(MOE, moe_ffn_hidden_size=None)
    same = dataclasses.replace(MOE, moe_ffn_hidden_size=mlp)
    assert _flops(by_default, experts) == _flops(given, same)
