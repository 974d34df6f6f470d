# SPDX-License-Identifier: Apache-2.0
"""Norms for layers made of local modules, where neither apex nor TransformerEngine is installed."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm:
    """Builds torch's `LayerNorm` or `RMSNorm`, marked for sequence parallelism.

    With sequence parallelism each tensor-parallel rank normalises its part of the sequence, so the
    gradients of the weights must be summed over these ranks; Megatron does that for parameters
    with the mark. Upstream's `WrappedTorchNorm` (megatron/core/transformer/torch_norm.py) refuses
    sequence parallelism instead.
    """

    def __new__(  # type: ignore[misc]  # a spec wants a class; like upstream's it builds torch's
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        """Returns the norm of `config.normalization` over the last `hidden_size` elements."""
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
