# SPDX-License-Identifier: Apache-2.0
"""Arguments as Megatron-LM names them in its checkpoints: of a job, and what theirs tell.

Source of the names: `load_args_from_checkpoint`, `check_checkpoint_args` and `load_checkpoint` of
megatron/training/checkpointing.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_moevement.training.model_description import NETWORK, model_description, with_defaults

if TYPE_CHECKING:
    from megatron_moevement.training.arguments import Arguments

_OTHER_WORDS = {
    "norm_epsilon": "layernorm_epsilon",
    "rope_fusion": "apply_rope_fusion",
    "overlap_p2p_communication": "overlap_p2p_comm",
}
"""By our name of a flag the attribute that Megatron-LM keeps its value in."""

_TOPICS = ("architecture", "moe", "transformer", "parallelism", "precision", "run", "optimization")

_WITH_DEFAULTS = (
    "ffn_hidden_size",
    "kv_channels",
    "moe_ffn_hidden_size",
    "max_position_embeddings",
)
"""What Megatron-LM's arguments say, too, where the flags leave it to a default."""

_NO_POSITIONS = "--no-position-embedding"
"""Has no effect, and Megatron-LM's loader refuses a checkpoint of a job without it."""

_AS_HERE: Mapping[str, tuple[Any, ...]] = {
    "multi_latent_attention": (None, False),
    "mtp_num_layers": (None, 0),
    "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "fp32_residual_connection": (None, False),
    "use_rope_scaling": (None, False),
    "no_rope_freq": (None,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "window_size": (None,),
    "softmax_type": (None, "vanilla"),
    "qk_clip": (None, False),
    "attention_output_gate": (None, False),
    "experimental_attention_variant": (None,),
    "openai_gelu": (None, False),
    "quick_geglu": (None, False),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (None, False),
    "hybrid_override_pattern": (None,),
    "spec": (None,),
    "is_hybrid_model": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
}
"""By argument of Megatron-LM the values with which a model is one that can be built here."""


def megatron_arguments(arguments: Arguments) -> dict[str, Any]:
    """Returns what Megatron-LM reads of `args` in a checkpoint, and all settings of its names.

    Values are of built-in types, so that a loader needs no class of ours.
    """
    settings: dict[str, Any] = {}
    for topic in _TOPICS:
        settings |= dataclasses.asdict(getattr(arguments, topic))
    settings |= vars(arguments.data.flags)
    named = {
        _OTHER_WORDS.get(name, name): _plain(value)
        for name, value in settings.items()
        if not name.startswith("moevement")
    }
    return named | _network(arguments) | _layout(arguments) | _ways(arguments)


def _network(arguments: Arguments) -> dict[str, Any]:
    architecture, tp = arguments.architecture, arguments.parallelism.tensor_model_parallel_size
    description = with_defaults(model_description(arguments))
    return {
        **{name: description[name] for name in _WITH_DEFAULTS},
        "seq_length": arguments.data.seq_length,
        "vocab_size": arguments.data.vocab_size,
        "padded_vocab_size": arguments.data.padded_vocab_size(tp),
        "add_bias_linear": not architecture.disable_bias_linear,
        "add_position_embedding": _NO_POSITIONS not in arguments.without_effect,
        "use_rotary_position_embeddings": architecture.position_embedding_type == "rope",
        "apply_layernorm_1p": False,
    }


def _layout(arguments: Arguments) -> dict[str, Any]:
    parallelism = arguments.parallelism
    layers = int(arguments.architecture.num_layers or 0)
    return {
        "world_size": arguments.world_size,
        "data_parallel_size": parallelism.data_parallel_size(arguments.world_size),
        "virtual_pipeline_model_parallel_size": parallelism.virtual_stages(layers),
        "context_parallel_size": 1,
    }


def _ways(arguments: Arguments) -> dict[str, Any]:
    """Returns how the checkpoint is written, and what the loader compares besides."""
    left_out = arguments.checkpointing.left_out
    return {
        "use_dist_ckpt": True,
        "ckpt_format": "torch_dist",
        "ckpt_fully_parallel_save": False,
        "dist_ckpt_optim_fully_reshardable": True,
        "data_parallel_random_init": False,
        "phase_transition_iterations": None,
        "no_save_optim": "optim" in left_out or None,
        "no_save_rng": "rng" in left_out or None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def described_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what Megatron-LM's arguments say of a model, as `model_description` names it."""
    words = {theirs: ours for ours, theirs in _OTHER_WORDS.items()}
    given = {words.get(name, name): value for name, value in args.items()}
    if "add_bias_linear" in args:
        given["disable_bias_linear"] = not args["add_bias_linear"]
    if given.get("use_rotary_position_embeddings"):
        given["position_embedding_type"] = "rope"
    kinds = given.get("moe_router_load_balancing_type", [])
    given["moe_router_load_balancing_type"] = [kinds] if isinstance(kinds, str) else list(kinds)
    names = (*NETWORK, "max_position_embeddings", "moe_router_load_balancing_type")
    if isinstance(given.get("moe_layer_freq"), list):
        given["moe_layer_freq"] = tuple(given["moe_layer_freq"])
    return {name: given[name] for name in names if name in given}


def other_kind(args: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of Megatron-LM that ask for a model which can't be built here."""
    return [
        f"{name}={args[name]!r}"
        for name, known in _AS_HERE.items()
        if name in args and args[name] not in known
    ]
