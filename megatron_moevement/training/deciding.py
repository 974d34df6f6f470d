# SPDX-License-Identifier: Apache-2.0
"""Which flags decide bits: every field of every group of flags is in one of the lists below.

A flag that decides a bit of the training is part of the run's name (`identity.py`): a launch with
another value is another run, and finds other memory. All others may change from launch to launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_moevement.integrations.megatron.transformer_options import TransformerOptions
from megatron_moevement.settings.architecture import Architecture, MixtureOfExperts
from megatron_moevement.settings.checkpointing import Checkpointing
from megatron_moevement.settings.fault_injection import FaultInjection
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.optimization import Optimization
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision
from megatron_moevement.settings.profiling import ProfilingConfig
from megatron_moevement.settings.rank_monitor import RankMonitoring
from megatron_moevement.settings.restart import InProcessRestart
from megatron_moevement.settings.run import Run
from megatron_moevement.training.data.arguments import DataFlags
from megatron_moevement.training.reporting.arguments import LoggingConfig


@dataclasses.dataclass(frozen=True)
class Deciding:
    """What the flags of a group decide.

    Attributes:
        bits: their values are part of the run's name.
        later: so are theirs, where they are not the default: flags that came after runs without
            them, which keep their names.
        resolved: decide bits together with other flags, with files or with the machine; what they
            come to is part of the run's name (`identity.py`).
        layout: decide what lies in the memory of the run and no bit of it: a launch that finds
            memory must have the same value. Of the sizes those count that its strategy has.
        nothing: decide no bit of a run that goes on.
    """

    bits: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    resolved: frozenset[str] = frozenset()
    layout: frozenset[str] = frozenset()
    nothing: frozenset[str] = frozenset()

    @property
    def all(self) -> list[str]:
        """Every field that is in a list, once for each list that it is in."""
        return [*self.bits, *self.later, *self.resolved, *self.layout, *self.nothing]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _all_of(group: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(group))


DECIDING: Mapping[type[Any], Deciding] = {
    Architecture: Deciding(
        bits=_all_of(Architecture) - {"persist_layer_norm"}, later=_names("persist_layer_norm")
    ),
    MixtureOfExperts: Deciding(
        bits=_all_of(MixtureOfExperts) - {"moe_per_layer_logging"},
        nothing=_names("moe_per_layer_logging"),
    ),
    TransformerOptions: Deciding(later=_all_of(TransformerOptions)),
    Parallelism: Deciding(
        bits=_names(
            """tensor_model_parallel_size pipeline_model_parallel_size
            num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
            decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
            expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
            use_distributed_optimizer overlap_grad_reduce overlap_param_gather
            overlap_p2p_communication ddp_bucket_size"""
        ),
        later=_names(
            """account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            pipeline_model_parallel_layout"""
        ),
        nothing=_names("distributed_timeout_minutes"),
    ),
    Precision: Deciding(bits=_all_of(Precision)),
    Run: Deciding(
        bits=_names("micro_batch_size seed deterministic_mode"),
        resolved=_names("global_batch_size train_iters train_samples moevement_backend"),
        nothing=_names(
            """manual_gc manual_gc_interval eval_interval eval_iters exit_interval
            exit_duration_in_mins moevement_state_digest"""
        ),
    ),
    Optimization: Deciding(
        bits=_names(
            """optimizer lr min_lr lr_decay_style lr_warmup_iters lr_warmup_fraction lr_warmup_init
            lr_wsd_decay_style lr_wsd_decay_iters weight_decay start_weight_decay end_weight_decay
            weight_decay_incr_style clip_grad adam_beta1 adam_beta2 adam_eps"""
        ),
        later=_names("lr_warmup_samples lr_wsd_decay_samples"),
        resolved=_names("lr_decay_iters lr_decay_samples"),
        # The position in the schedule comes from memory, and the ledger compares what it gives.
        nothing=_names("override_opt_param_scheduler use_checkpoint_opt_param_scheduler"),
    ),
    Checkpointing: Deciding(
        resolved=_names("load ckpt_step finetune no_load_optim no_load_rng"),
        nothing=_names(
            """save async_save save_interval save_retain_interval no_save_optim no_save_rng
            ckpt_format use_checkpoint_args exit_on_missing_checkpoint"""
        ),
    ),
    FaultTolerance: Deciding(
        layout=_names("moevement_strategy moevement_min_window moevement_max_window"),
        nothing=_names(
            """moevement_window moevement_schedule_changes moevement_max_replay_steps
            moevement_order moevement_order_decay
            moevement_replicas moevement_strict_replicas moevement_failure_domain
            moevement_no_frozen_skip moevement_no_upstream_log moevement_no_replica_copy
            moevement_no_adoption moevement_recover_only moevement_operators moevement_store_dir
            moevement_run_id moevement_host_memory_limit_gb moevement_replication_interface
            moevement_slow_rank_factor moevement_audit_interval
            moevement_tier_dir moevement_tier_interval moevement_tier_keep"""
        ),
    ),
    DataFlags: Deciding(
        bits=_names(
            """mock_data seq_length make_vocab_size_divisible_by reset_position_ids
            reset_attention_mask eod_mask_loss"""
        ),
        resolved=_names(
            """data_path train_data_path split tokenizer_type tokenizer_model vocab_size vocab_file
            merge_file tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens"""
        ),
        nothing=_names(
            """valid_data_path test_data_path data_cache_path mmap_bin_files num_workers
            num_dataset_builder_threads"""
        ),
    ),
    InProcessRestart: Deciding(
        resolved=_names("inprocess_active_world_size"),
        nothing=_all_of(InProcessRestart) - {"inprocess_active_world_size"},
    ),
    RankMonitoring: Deciding(nothing=_all_of(RankMonitoring)),
    FaultInjection: Deciding(nothing=_all_of(FaultInjection)),
    LoggingConfig: Deciding(nothing=_all_of(LoggingConfig)),
    ProfilingConfig: Deciding(nothing=_all_of(ProfilingConfig)),
}
"""By group of flags. A group whose fields are listed one by one needs a line for a new flag."""
