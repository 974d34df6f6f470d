# SPDX-License-Identifier: Apache-2.0
"""How the model is spread over ranks, and the arithmetic of ranks and micro-batches."""

from __future__ import annotations

import dataclasses

from megatron_moevement.errors import UserError
from megatron_moevement.settings.architecture import Architecture, MixtureOfExperts
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import count, flag, positive
from megatron_moevement.settings.pipeline_layout import check_layout, parts_of


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """Degrees of parallelism and how gradients and parameters travel."""

    tensor_model_parallel_size: int = count(1, "ranks that share each layer (TP)")
    pipeline_model_parallel_size: int = count(1, "pipeline stages (PP)")
    num_layers_per_virtual_pipeline_stage: int | None = count(
        None, "layers per virtual stage: interleaved schedule (VPP)"
    )
    num_virtual_stages_per_pipeline_rank: int | None = count(
        None, "model chunks per pipeline rank: interleaved schedule (VPP)"
    )
    decoder_first_pipeline_num_layers: int | None = count(None, "layers of the first stage")
    decoder_last_pipeline_num_layers: int | None = count(None, "layers of the last stage")
    account_for_embedding_in_pipeline_split: bool = flag(False, "the embedding counts as a layer")
    account_for_loss_in_pipeline_split: bool = flag(False, "the loss counts as a layer")
    pipeline_model_parallel_layout: str | None = flag(
        None, "modules of each stage and chunk, such as Et*3|(tt|)*2tL"
    )
    expert_model_parallel_size: int = count(1, "ranks that share the experts of a layer (EP)")
    expert_tensor_parallel_size: int | None = count(
        None, "ranks that share each expert (default: TP)"
    )
    sequence_parallel: bool = flag(False, "split norms and dropout along the sequence over TP")
    use_distributed_optimizer: bool = flag(
        False, "shard optimizer state over the data-parallel ranks"
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients while backward runs")
    overlap_param_gather: bool = flag(False, "gather parameters while forward runs")
    overlap_p2p_communication: bool = flag(
        True, "send between interleaved stages in batches, not while others compute"
    )
    ddp_bucket_size: int | None = count(None, "parameters per bucket of gradient reduction")
    distributed_timeout_minutes: float = positive(10.0, "limit of one collective")

    def virtual_stages(self, num_layers: int) -> int | None:
        """Returns the number of model chunks per pipeline rank, None without interleaving."""
        if self.pipeline_model_parallel_layout is not None:
            parts = len(parts_of(self.pipeline_model_parallel_layout))
            chunks = parts // self.pipeline_model_parallel_size
            return chunks if chunks > 1 else None
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is not None:
            counted = num_layers + self.counted_modules
            per_rank = counted // self.pipeline_model_parallel_size
            return per_rank // self.num_layers_per_virtual_pipeline_stage
        return None

    def sends_single_messages(self, num_layers: int) -> bool:
        """Returns whether stages send each other single messages, which they need not wait for.

        With two stages both neighbours are one rank, and a batch of messages to and from it would
        be matched wrongly when the schedule is interleaved.
        """
        return self.virtual_stages(num_layers) is not None and self.overlap_p2p_communication

    @property
    def counted_modules(self) -> int:
        """How many modules besides the layers count as one where these are divided."""
        return sum(
            (self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split)
        )

    @property
    def expert_tensor_parallel(self) -> int:
        """Over how many ranks each expert is divided."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Returns the number of data-parallel replicas of the dense part (Megatron's DP)."""
        return world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)


def check_parallelism(
    parallelism: Parallelism, architecture: Architecture, moe: MixtureOfExperts
) -> None:
    """Checks that the model can be spread over ranks; it has its sizes.

    Raises:
        UserError: sizes don't divide or flags contradict each other.
    """
    checks = Checks()
    checks.passes(_check_tensor_parallel, parallelism, architecture, moe)
    checks.passes(_check_experts, parallelism, moe)
    checks.passes(_check_stages, parallelism, architecture)
    if parallelism.overlap_param_gather and not (
        parallelism.use_distributed_optimizer and parallelism.overlap_grad_reduce
    ):
        checks.refuse(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"
        )
    checks.end()


def check_world(parallelism: Parallelism, world_size: int) -> None:
    """Checks that `world_size` ranks can be divided as the flags say.

    Raises:
        UserError: they can't.
    """
    tp = parallelism.tensor_model_parallel_size
    pp = parallelism.pipeline_model_parallel_size
    if world_size % (tp * pp):
        raise UserError(
            f"{world_size} ranks can't be divided into tensor parallel {tp} x pipeline parallel "
            f"{pp}; start a multiple of {tp * pp} ranks or change the sizes"
        )
    ep, expert_tp = parallelism.expert_model_parallel_size, parallelism.expert_tensor_parallel
    if world_size % (ep * expert_tp * pp):
        raise UserError(
            f"{world_size} ranks can't be divided into expert parallel {ep} x expert tensor "
            f"parallel {expert_tp} x pipeline parallel {pp}"
        )


def _check_tensor_parallel(
    parallelism: Parallelism, architecture: Architecture, moe: MixtureOfExperts
) -> None:
    checks = Checks()
    tp = parallelism.tensor_model_parallel_size
    heads = int(architecture.num_attention_heads or 0)
    if heads % tp:
        checks.refuse(
            f"--num-attention-heads {heads} is no multiple of --tensor-model-parallel-size {tp}"
        )
    checks.passes(_check_widths, tp, parallelism.expert_tensor_parallel, architecture, moe)
    groups = architecture.num_query_groups
    if architecture.group_query_attention and (heads % groups or groups % tp):
        checks.refuse(
            f"--num-query-groups {groups} must divide --num-attention-heads {heads} and be a "
            f"multiple of --tensor-model-parallel-size {tp}"
        )
    if tp > 1 and moe.num_experts is not None and not parallelism.sequence_parallel:
        checks.refuse("--tensor-model-parallel-size above 1 with experts needs --sequence-parallel")
    checks.end()


def _check_widths(
    tp: int, expert_tp: int, architecture: Architecture, moe: MixtureOfExperts
) -> None:
    """Checks that each matrix can be cut: `tp` pieces of the dense ones, `expert_tp` of experts."""
    checks = Checks()
    dense, experts = "--tensor-model-parallel-size", "--expert-tensor-parallel-size"
    shared = moe.moe_shared_expert_intermediate_size
    cuts = (
        ("--hidden-size", architecture.hidden_size, dense, tp),
        ("--ffn-hidden-size", architecture.ffn_hidden_size, dense, tp),
        ("--moe-shared-expert-intermediate-size", shared, dense, tp),
        ("--moe-ffn-hidden-size", moe.moe_ffn_hidden_size, experts, expert_tp),
    )
    for name, width, divisor_name, divisor in cuts:
        if width is not None and width % divisor:
            checks.refuse(f"{name} {width} is no multiple of {divisor_name} {divisor}")
    checks.end()


def _check_experts(parallelism: Parallelism, moe: MixtureOfExperts) -> None:
    ep = parallelism.expert_model_parallel_size
    if ep > 1 and (moe.num_experts is None or moe.num_experts % ep):
        raise UserError(
            f"--num-experts {moe.num_experts} is no multiple of --expert-model-parallel-size {ep}"
        )


def _check_chunks(parallelism: Parallelism, architecture: Architecture) -> None:
    layers = int(architecture.num_layers or 0)
    pp = parallelism.pipeline_model_parallel_size
    per_virtual = parallelism.num_layers_per_virtual_pipeline_stage
    chunks = parallelism.virtual_stages(layers)
    if per_virtual is not None and parallelism.num_virtual_stages_per_pipeline_rank is not None:
        raise UserError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "mean the same; give one of them"
        )
    if chunks is None:
        return
    if pp == 1:
        raise UserError("an interleaved schedule needs --pipeline-model-parallel-size above 1")
    if pp == 2 and not parallelism.overlap_p2p_communication:
        raise UserError(
            "--no-overlap-p2p-communication: with two interleaved stages both neighbours are one "
            "rank, and batched messages would be mixed up; leave the flag out or use more stages"
        )
    if per_virtual is not None and _uneven_stages(parallelism):
        raise UserError(
            "--num-layers-per-virtual-pipeline-stage takes stages of one size; with "
            f"{', '.join(_uneven_stages(parallelism))} give --num-virtual-stages-per-pipeline-rank"
        )
    if per_virtual is not None and (layers + parallelism.counted_modules) % (pp * per_virtual):
        raise UserError(
            f"--num-layers {layers} is no multiple of --num-layers-per-virtual-pipeline-stage "
            f"{per_virtual} x --pipeline-model-parallel-size {pp}"
        )
    if chunks == 1:
        raise UserError(
            "an interleaved schedule needs two chunks or more on each stage; "
            f"with {layers} layers on {pp} stages there is one: leave the flag out"
        )


def _uneven_stages(parallelism: Parallelism) -> dict[str, int]:
    """Returns the flags that give a stage a number of layers of its own."""
    given = {
        "--decoder-first-pipeline-num-layers": parallelism.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallelism.decoder_last_pipeline_num_layers,
    }
    return {name: value for name, value in given.items() if value is not None}


def _check_given_layout(parallelism: Parallelism, layers: int) -> None:
    per_virtual = parallelism.num_layers_per_virtual_pipeline_stage
    others = {
        **_uneven_stages(parallelism),
        "--account-for-embedding/loss-in-pipeline-split": parallelism.counted_modules or None,
        "--num-layers-per-virtual-pipeline-stage": per_virtual,
        "--num-virtual-stages-per-pipeline-rank": parallelism.num_virtual_stages_per_pipeline_rank,
    }
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UserError(f"--pipeline-model-parallel-layout excludes {', '.join(given)}")
    layout = str(parallelism.pipeline_model_parallel_layout)
    check_layout(layout, parallelism.pipeline_model_parallel_size, layers)


def _check_stages(parallelism: Parallelism, architecture: Architecture) -> None:
    layers = int(architecture.num_layers or 0)
    pp = parallelism.pipeline_model_parallel_size
    if parallelism.pipeline_model_parallel_layout is not None:
        _check_given_layout(parallelism, layers)
        return
    _check_chunks(parallelism, architecture)
    chunks = parallelism.virtual_stages(layers)
    given = _uneven_stages(parallelism)
    if given and parallelism.counted_modules:
        raise UserError(
            f"{', '.join(given)} and --account-for-embedding/loss-in-pipeline-split exclude each "
            "other"
        )
    rest = layers + parallelism.counted_modules - sum(given.values())
    stages = pp - len(given)
    if stages < 0 or rest < 0 or (stages == 0 and rest > 0):
        raise UserError(f"{', '.join(given)} don't fit {layers} layers on {pp} stages")
    pieces = stages * (chunks or 1)
    if pieces and (rest % pieces or rest == 0):
        raise UserError(
            f"{rest} layers can't be divided evenly over {stages} pipeline stages"
            + (f" of {chunks} chunks" if chunks else "")
            + "; change --num-layers or give --decoder-first/last-pipeline-num-layers"
        )
