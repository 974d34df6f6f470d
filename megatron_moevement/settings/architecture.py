# SPDX-License-Identifier: Apache-2.0
"""What the network is: the flags of its shape and of its experts."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from enum import Enum

from megatron_moevement.errors import UserError
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import (
    SHARE,
    count,
    flag,
    not_negative,
    positive,
    probability,
)


class TransformerImpl(Enum):
    """Whose modules the layers are made of."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class LoadBalancing(Enum):
    """How the router is kept from sending all tokens to few experts."""

    AUX_LOSS = "aux_loss"
    SEQ_AUX_LOSS = "seq_aux_loss"
    GLOBAL_AUX_LOSS = "global_aux_loss"
    SINKHORN = "sinkhorn"
    NONE = "none"


def parse_layer_freq(text: str) -> tuple[int, ...] | int:
    """Parses `--moe-layer-freq`: an integer N, or a list expression such as `[0]*1+[1]*3`."""
    allowed = (ast.Expression, ast.List, ast.BinOp, ast.Add, ast.Mult, ast.Constant, ast.Load)
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if not all(isinstance(node, allowed) for node in ast.walk(tree)):
            raise ValueError(text)
        value = eval(compile(tree, "--moe-layer-freq", "eval"), {"__builtins__": {}})  # noqa: S307
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"{text!r} is neither an integer nor a list such as [0]*1+[1]*3"
        ) from error
    if isinstance(value, int) and value > 0:
        return value
    if isinstance(value, list) and value and set(value) <= {0, 1}:
        return tuple(value)
    raise ValueError(f"{text!r} is neither a positive integer nor a list of 0 (dense) and 1 (MoE)")


def default_mlp_width(hidden_size: int, *, is_gated: bool) -> int:
    """Returns the width that Megatron-LM gives an MLP without `--ffn-hidden-size`.

    A gate is a third matrix: two thirds of the width have as many weights.
    """
    return int((4 * hidden_size * 2 / 3) / 64) * 64 if is_gated else 4 * hidden_size


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The transformer around the experts."""

    num_layers: int | None = count(None, "number of transformer layers")
    hidden_size: int | None = count(None, "width of the residual stream")
    ffn_hidden_size: int | None = count(
        None, "width of the dense MLP (default: 4 x hidden size; with --swiglu 2/3 of it)"
    )
    num_attention_heads: int | None = count(None, "number of attention heads")
    kv_channels: int | None = count(None, "width of a head (default: hidden size / heads)")
    group_query_attention: bool = flag(False, "share keys and values among groups of heads")
    num_query_groups: int = count(1, "groups of heads that share keys and values")
    max_position_embeddings: int | None = count(None, "longest sequence (default: --seq-length)")
    position_embedding_type: str = flag(
        "learned_absolute", "kind of positions", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = count(10000, "base of the rotary angles")
    rotary_percent: float = flag(1.0, "part of a head that is rotated", within=SHARE)
    normalization: str = flag("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = positive(1e-5, "added to the variance in a norm")
    swiglu: bool = flag(False, "gated linear units with SiLU")
    squared_relu: bool = flag(False, "squared ReLU instead of GELU")
    disable_bias_linear: bool = flag(False, "no biases in linear layers")
    add_qkv_bias: bool = flag(False, "a bias in the QKV projection alone")
    qk_layernorm: bool = flag(False, "normalise queries and keys")
    untie_embeddings_and_output_weights: bool = flag(False, "an output layer of its own")
    init_method_std: float = not_negative(0.02, "standard deviation of the initial weights")
    attention_dropout: float = probability(0.1, "dropout of attention probabilities")
    hidden_dropout: float = probability(0.1, "dropout of the residual branches")
    transformer_impl: TransformerImpl | None = flag(
        None,
        "whose modules the layers are made of (default: those of TransformerEngine on CUDA, where "
        "it is installed, else local)",
    )
    attention_softmax_in_fp32: bool = flag(False, "attention softmax in FP32")
    recompute_granularity: str | None = flag(
        None, "recompute activations in backward", choices=("selective", "full")
    )
    recompute_method: str | None = flag(
        None, "which layers are recomputed in full", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = count(None, "layers per recomputed unit")
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "modules recomputed by selective granularity (default: core_attn)",
        choices=("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
        nargs="+",
    )
    bias_swiglu_fusion: bool = flag(True, "do not fuse SwiGLU (fused on CUDA)")
    bias_dropout_fusion: bool = flag(True, "do not fuse bias, dropout and residual (CUDA)")
    persist_layer_norm: bool = flag(True, "do not keep LayerNorm's kernel resident (apex on CUDA)")
    masked_softmax_fusion: bool = flag(True, "do not fuse the masked softmax (apex on CUDA)")
    rope_fusion: bool = flag(True, "do not fuse rotary embeddings (TransformerEngine or apex)")
    gradient_accumulation_fusion: bool = flag(
        True, "do not fuse gradient accumulation into the weight-gradient GEMM (apex)"
    )

    @property
    def mlp_width(self) -> int:
        """Width of the dense MLP."""
        return self.ffn_hidden_size or default_mlp_width(
            int(self.hidden_size or 0), is_gated=self.swiglu
        )

    @property
    def is_local(self) -> bool:
        """Whether layers are made of local modules; so they are until a device is chosen."""
        return self.transformer_impl is not TransformerImpl.TRANSFORMER_ENGINE


@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """The experts and their routers."""

    num_experts: int | None = count(None, "experts per MoE layer; none: a dense model")
    moe_layer_freq: tuple[int, ...] | int = flag(
        1, "every N-th layer is MoE, or a list such as [0]*1+[1]*3", parse=parse_layer_freq
    )
    moe_ffn_hidden_size: int | None = count(None, "width of an expert (default: that of the MLP)")
    moe_shared_expert_intermediate_size: int | None = count(
        None, "total width of the shared experts (default: none)"
    )
    moe_shared_expert_gate: bool = flag(False, "a gate on the shared experts")
    moe_router_topk: int = count(2, "experts per token")
    moe_router_load_balancing_type: tuple[LoadBalancing, ...] = flag(
        (LoadBalancing.AUX_LOSS,), "load balancing, one or several", nargs="+"
    )
    moe_aux_loss_coeff: tuple[float, ...] = not_negative(
        (0.0,), "coefficient of each auxiliary loss (a start: 1e-2)", nargs="+"
    )
    moe_z_loss_coeff: float | None = not_negative(None, "coefficient of the z-loss (a start: 1e-3)")
    moe_input_jitter_eps: float | None = probability(None, "jitter of the router's input")
    moe_router_score_function: str = flag(
        "softmax", "score of an expert", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(False, "softmax before top-k")
    moe_router_num_groups: int | None = count(None, "groups of experts for group-limited routing")
    moe_router_group_topk: int | None = count(None, "groups per token")
    moe_router_topk_scaling_factor: float | None = positive(None, "factor on the routing scores")
    moe_router_dtype: str | None = flag(None, "type of routing", choices=("fp32", "fp64"))
    moe_router_enable_expert_bias: bool = flag(False, "balance without aux loss, by a bias")
    moe_router_bias_update_rate: float = not_negative(1e-3, "step of that bias; 0: it stays")
    moe_expert_capacity_factor: float | None = positive(
        None, "capacity of an expert over its fair share (default: dropless)"
    )
    moe_pad_expert_input_to_capacity: bool = flag(False, "pad every expert to its capacity")
    moe_token_drop_policy: str = flag(
        "probs", "which tokens a full expert drops", choices=("probs", "position")
    )
    moe_token_dispatcher_type: str = flag(
        "allgather", "how tokens reach experts", choices=("allgather", "alltoall")
    )
    moe_grouped_gemm: bool = flag(False, "compute all local experts in one grouped GEMM")
    moe_per_layer_logging: bool = flag(False, "log auxiliary losses per layer")


_NEED_TRANSFORMER_ENGINE = frozenset({"layernorm", "moe_act"})
"""Recomputed modules that upstream implements in TransformerEngine's modules or its FP8 alone."""


def check_sizes(architecture: Architecture) -> None:
    """Checks that the sizes are given that every network has.

    Raises:
        UserError: one is missing.
    """
    checks = Checks()
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(architecture, name) is None:
            checks.refuse(f"--{name.replace('_', '-')} is missing: give it or --model-preset")
    checks.end()


def check_architecture(architecture: Architecture, moe: MixtureOfExperts) -> None:
    """Checks what concerns the network alone, one that has its sizes.

    Raises:
        UserError: sizes don't divide, or flags contradict each other.
    """
    checks = Checks()
    if architecture.swiglu and architecture.squared_relu:
        checks.refuse("--swiglu and --squared-relu exclude each other; give one of them")
    checks.passes(_check_heads, architecture)
    checks.passes(_check_mlp_width, architecture, moe)
    checks.passes(_check_recomputation, architecture)
    checks.passes(_check_moe, architecture, moe)
    if not architecture.is_local and not _has_transformer_engine():
        checks.refuse(
            "--transformer-impl transformer_engine: TransformerEngine is not installed; "
            "install it (it comes with the NGC PyTorch image) or use --transformer-impl local"
        )
    checks.end()


def with_layers(architecture: Architecture, *, on_gpu: bool) -> Architecture:
    """Returns the network with layers that suit the device, unless a flag says which."""
    if architecture.transformer_impl is not None:
        return architecture
    fast = on_gpu and _has_transformer_engine()
    chosen = TransformerImpl.TRANSFORMER_ENGINE if fast else TransformerImpl.LOCAL
    return dataclasses.replace(architecture, transformer_impl=chosen)


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _check_mlp_width(architecture: Architecture, moe: MixtureOfExperts) -> None:
    is_used = moe.moe_ffn_hidden_size is None or not all(layer_pattern(architecture, moe))
    if is_used and architecture.mlp_width == 0:
        raise UserError(
            f"--swiglu with --hidden-size {architecture.hidden_size} needs --ffn-hidden-size: "
            "Megatron-LM's default of 2/3 of 4 x hidden size, in steps of 64, is 0"
        )


def _check_heads(architecture: Architecture) -> None:
    width, heads = int(architecture.hidden_size or 0), int(architecture.num_attention_heads or 1)
    if architecture.kv_channels is None and width % heads:
        raise UserError(
            f"--hidden-size {width} is no multiple of --num-attention-heads {heads}; "
            "give --kv-channels or other sizes"
        )
    head = architecture.kv_channels or width // heads
    turned = int(head * architecture.rotary_percent)
    if architecture.position_embedding_type == "rope" and (turned % 2 or turned == 0):
        raise UserError(
            f"--position-embedding-type rope turns pairs of channels, and of the {head} of a head "
            f"it is to turn {turned}; choose --kv-channels and --rotary-percent for an even number"
        )


def _check_recomputation(architecture: Architecture) -> None:
    checks = Checks()
    full = architecture.recompute_granularity == "full"
    for name in ("recompute_method", "recompute_num_layers"):
        option = f"--{name.replace('_', '-')}"
        given = getattr(architecture, name) is not None
        if full and not given:
            checks.refuse(f"--recompute-granularity full needs {option}")
        if given and not full:
            checks.refuse(f"{option} needs --recompute-granularity full")
    if architecture.recompute_modules and architecture.recompute_granularity != "selective":
        checks.refuse("--recompute-modules needs --recompute-granularity selective")
    engines = _NEED_TRANSFORMER_ENGINE.intersection(architecture.recompute_modules or ())
    if architecture.is_local and engines:
        checks.refuse(
            f"--recompute-modules {' '.join(sorted(engines))} needs --transformer-impl "
            "transformer_engine; local modules recompute core_attn, mlp, moe and shared_experts"
        )
    checks.end()


def _check_moe(architecture: Architecture, moe: MixtureOfExperts) -> None:
    checks = Checks()
    if isinstance(moe.moe_layer_freq, tuple) and len(moe.moe_layer_freq) != architecture.num_layers:
        checks.refuse(
            f"--moe-layer-freq lists {len(moe.moe_layer_freq)} layers and --num-layers is "
            f"{architecture.num_layers}; list each layer once"
        )
    if moe.num_experts is not None and moe.moe_router_topk > moe.num_experts:
        checks.refuse(
            f"--moe-router-topk {moe.moe_router_topk} exceeds --num-experts {moe.num_experts}"
        )
    if len(moe.moe_aux_loss_coeff) != len(moe.moe_router_load_balancing_type):
        checks.refuse(
            "--moe-aux-loss-coeff must have one value for each --moe-router-load-balancing-type"
        )
    if (
        moe.num_experts is not None
        and architecture.is_local
        and not architecture.disable_bias_linear
    ):
        # upstream's MLP adds an expert's bias to a view in place, which autograd forbids
        checks.refuse("--num-experts: local experts have no biases: --disable-bias-linear")
    if moe.moe_shared_expert_gate and moe.moe_shared_expert_intermediate_size is None:
        checks.refuse("--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size")
    checks.passes(_check_balancing, moe)
    checks.passes(_check_expert_groups, moe)
    checks.end()


def _check_balancing(moe: MixtureOfExperts) -> None:
    """Refuses what upstream's router would leave out without a word."""
    kinds = moe.moe_router_load_balancing_type
    alone = {LoadBalancing.SINKHORN, LoadBalancing.NONE}.intersection(kinds)
    if alone and len(kinds) > 1:
        name = min(kind.value for kind in alone)
        raise UserError(
            f"--moe-router-load-balancing-type {name} excludes all others; give it alone"
        )
    if LoadBalancing.SINKHORN not in kinds:
        return
    if any(moe.moe_aux_loss_coeff):
        raise UserError(
            "--moe-router-load-balancing-type sinkhorn has no auxiliary loss: "
            "--moe-aux-loss-coeff 0"
        )
    if moe.moe_router_enable_expert_bias:
        raise UserError(
            "--moe-router-load-balancing-type sinkhorn uses no bias: "
            "drop --moe-router-enable-expert-bias"
        )


def _check_expert_groups(moe: MixtureOfExperts) -> None:
    groups, chosen = moe.moe_router_num_groups, moe.moe_router_group_topk
    if (groups is None) != (chosen is None):
        raise UserError("--moe-router-num-groups and --moe-router-group-topk need each other")
    if groups is None or chosen is None or moe.num_experts is None:
        return
    if moe.num_experts % groups or chosen > groups:
        raise UserError(
            f"--moe-router-num-groups {groups} must divide --num-experts {moe.num_experts} and be "
            f"at least --moe-router-group-topk {chosen}"
        )
    topk, size = moe.moe_router_topk, moe.num_experts // groups
    if topk % chosen or topk // chosen > size:
        raise UserError(
            f"--moe-router-topk {topk} must be a multiple of --moe-router-group-topk {chosen}, "
            f"with at most {size} experts of each group"
        )


def layer_pattern(architecture: Architecture, moe: MixtureOfExperts) -> tuple[bool, ...]:
    """Returns for each layer whether it is a mixture of experts, from the first to the last."""
    layers = int(architecture.num_layers or 0)
    if moe.num_experts is None:
        return (False,) * layers
    if isinstance(moe.moe_layer_freq, tuple):
        return tuple(bool(one) for one in moe.moe_layer_freq)
    return tuple(layer % moe.moe_layer_freq == 0 for layer in range(layers))
