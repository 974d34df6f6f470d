# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of one iteration of a GPT with experts.

Source: `num_floating_point_operations` of megatron/training/training.py. A GEMM of [m, n] with
[n, k] takes 2mnk operations, three times: forward, input gradient, weight gradient. Half of the
attention matrix is masked. Norms, activations, routers and recomputation are not counted.
"""

from __future__ import annotations

from megatron_moevement.settings.architecture import (
    Architecture,
    MixtureOfExperts,
    layer_pattern,
)

_GEMMS_PER_TRAINED_GEMM = 3
_OPERATIONS_PER_MULTIPLY_ADD = 2


def flops_per_iteration(
    architecture: Architecture,
    moe: MixtureOfExperts,
    *,
    padded_vocab_size: int,
    seq_length: int,
    global_batch_size: int,
) -> int:
    """Returns the operations of one iteration of the whole job."""
    width = int(architecture.hidden_size or 0)
    pattern = layer_pattern(architecture, moe)
    per_token = (
        sum(
            _expert_layer(architecture, moe) if is_moe else _mlp(architecture) for is_moe in pattern
        )
        + len(pattern) * _attention(architecture, seq_length)
        + width * padded_vocab_size
    )
    scale = _GEMMS_PER_TRAINED_GEMM * _OPERATIONS_PER_MULTIPLY_ADD
    return scale * global_batch_size * seq_length * per_token


def _attention(architecture: Architecture, seq_length: int) -> int:
    """Multiply-adds of one token: QKV, scores and values over half the sequence, projection."""
    width = int(architecture.hidden_size or 0)
    heads = int(architecture.num_attention_heads or 1)
    head_width = architecture.kv_channels or width // heads
    groups = architecture.num_query_groups if architecture.group_query_attention else heads
    queries, keys = heads * head_width, groups * head_width
    return width * (queries + 2 * keys) + queries * seq_length + queries * width


def _mlp(architecture: Architecture) -> int:
    return _projections(architecture) * int(architecture.hidden_size or 0) * architecture.mlp_width


def _expert_layer(architecture: Architecture, moe: MixtureOfExperts) -> int:
    expert = moe.moe_ffn_hidden_size or architecture.mlp_width
    shared = moe.moe_shared_expert_intermediate_size or 0
    active = moe.moe_router_topk * expert + shared
    return _projections(architecture) * int(architecture.hidden_size or 0) * active


def _projections(architecture: Architecture) -> int:
    """GEMMs of an MLP: in and out, and the gate of SwiGLU."""
    return 3 if architecture.swiglu else 2
