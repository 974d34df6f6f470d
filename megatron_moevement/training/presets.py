# SPDX-License-Identifier: Apache-2.0
"""Model presets: the evaluated models of the paper, and a tiny one.

The paper (section 5.1, its table of models) gives layers, experts, top-k and the numbers of total
and active parameters; the widths here are chosen so that both numbers come out. Of MoE-LLaVa only
the language backbone is here, without the vision tower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_moevement.settings.architecture import Architecture, MixtureOfExperts

_LLAMA_LIKE = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "disable_bias_linear": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": (1e-2,),
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": _LLAMA_LIKE
        | {
            "num_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "ffn_hidden_size": 256,
            "num_experts": 8,
            "moe_ffn_hidden_size": 128,
            "moe_router_topk": 2,
            "seq_length": 128,
            "make_vocab_size_divisible_by": 64,
        },
        "moe-llava": _LLAMA_LIKE
        | {
            "num_layers": 32,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "ffn_hidden_size": 4576,
            "num_experts": 4,
            "moe_layer_freq": 2,
            "moe_router_topk": 2,
            "vocab_size": 50304,
            "seq_length": 2048,
        },
        "gpt-moe": {
            "num_layers": 12,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "ffn_hidden_size": 4480,
            "disable_bias_linear": True,
            "num_experts": 32,
            "moe_router_topk": 6,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": (1e-2,),
            "vocab_size": 50304,
            "seq_length": 2048,
        },
        "qwen-moe": _LLAMA_LIKE
        | {
            "num_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "add_qkv_bias": True,
            "untie_embeddings_and_output_weights": True,
            "ffn_hidden_size": 1408,
            "num_experts": 64,
            "moe_router_topk": 8,
            "vocab_size": 151936,
            "seq_length": 2048,
        },
        "deepseek-moe": _LLAMA_LIKE
        | {
            "num_layers": 28,
            "hidden_size": 2560,
            "num_attention_heads": 20,
            "untie_embeddings_and_output_weights": True,
            "ffn_hidden_size": 10944,
            "num_experts": 64,
            "moe_layer_freq": (0,) + (1,) * 27,
            "moe_ffn_hidden_size": 1104,
            "moe_shared_expert_intermediate_size": 2208,
            "moe_router_topk": 8,
            "moe_router_pre_softmax": True,
            "vocab_size": 102400,
            "seq_length": 2048,
        },
    }
)
"""Defaults of flags, by preset; a flag on the command line overrides its default."""


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameters of a whole model.

    Attributes:
        active: those that one token uses: of the routed experts, top-k per layer.
    """

    total: int
    active: int


PARAMETERS: Mapping[str, ParameterCount] = MappingProxyType(
    {
        "tiny": ParameterCount(1_881_216, 701_568),
        "moe-llava": ParameterCount(2_889_353_216, 1_989_675_008),
        "gpt-moe": ParameterCount(7_355_863_040, 1_630_638_080),
        "qwen-moe": ParameterCount(14_315_931_648, 2_689_320_960),
        "deepseek-moe": ParameterCount(16_455_989_760, 3_636_165_120),
    }
)
"""By preset, with its `vocab_size` or that of bytes; a test counts those of Megatron's models."""


def preset_model(name: str) -> tuple[Architecture, MixtureOfExperts]:
    """Returns the network of a preset as it is without further flags."""

    def fill(group: type[Any]) -> Any:
        known = {field.name for field in dataclasses.fields(group)}
        return group(**{flag: value for flag, value in PRESETS[name].items() if flag in known})

    return fill(Architecture), fill(MixtureOfExperts)
