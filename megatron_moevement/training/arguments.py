# SPDX-License-Identifier: Apache-2.0
"""The command line of `pretrain_moe.py`: Megatron-LM's flags, and ours as `--moevement-*`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.transformer_options import TransformerOptions
from megatron_moevement.settings.architecture import (
    Architecture,
    MixtureOfExperts,
    check_architecture,
)
from megatron_moevement.settings.checkpointing import Checkpointing, check_checkpointing
from megatron_moevement.settings.fault_injection import FaultInjection, check_fault_injection
from megatron_moevement.settings.fault_tolerance import FaultTolerance, check_fault_tolerance
from megatron_moevement.settings.flags import add_flags, read_flags
from megatron_moevement.settings.optimization import Optimization, check_optimization
from megatron_moevement.settings.parallelism import Parallelism, check_parallelism
from megatron_moevement.settings.parser import UserParser, add_version
from megatron_moevement.settings.precision import Precision, check_precision
from megatron_moevement.settings.rank_monitor import RankMonitoring, check_rank_monitoring
from megatron_moevement.settings.restart import InProcessRestart, check_restart
from megatron_moevement.settings.run import Run, check_run, in_iterations, num_microbatches
from megatron_moevement.strategies.registry import STRATEGIES
from megatron_moevement.training.checkpoint_arguments import network_in
from megatron_moevement.training.data.arguments import DataConfig, DataFlags, check_positions
from megatron_moevement.training.presets import PRESETS
from megatron_moevement.training.refusals import accepted
from megatron_moevement.training.reporting.arguments import LoggingConfig
from megatron_moevement.training.yaml_arguments import with_yaml

GROUPS: Mapping[str, tuple[str, type[Any]]] = {
    "architecture": ("network", Architecture),
    "moe": ("mixture of experts", MixtureOfExperts),
    "transformer": ("as in TransformerConfig", TransformerOptions),
    "parallelism": ("parallelism", Parallelism),
    "precision": ("precision", Precision),
    "run": ("run", Run),
    "optimization": ("optimization", Optimization),
    "checkpointing": ("checkpointing", Checkpointing),
    "fault_tolerance": ("fault tolerance", FaultTolerance),
    "restart": ("in-process restart", InProcessRestart),
    "monitoring": ("rank monitors of ft_launcher", RankMonitoring),
    "fault_injection": ("faults on purpose", FaultInjection),
}
"""For each topic of `Arguments` the title of its flags in `--help`, and these."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Everything the command line says, by topic, and how many ranks train.

    Attributes:
        without_effect: flags of Megatron-LM that were given and change nothing here.
    """

    architecture: Architecture
    moe: MixtureOfExperts
    transformer: TransformerOptions
    parallelism: Parallelism
    precision: Precision
    run: Run
    optimization: Optimization
    checkpointing: Checkpointing
    fault_tolerance: FaultTolerance
    restart: InProcessRestart
    monitoring: RankMonitoring
    fault_injection: FaultInjection
    data: DataConfig
    logging: LoggingConfig
    world_size: int
    without_effect: tuple[str, ...] = ()


def build_parser() -> UserParser:
    """Returns the parser of all flags."""
    parser = UserParser(prog="pretrain_moe.py", description=__doc__)
    add_version(parser)
    parser.add_argument(
        "--model-preset",
        choices=sorted(PRESETS),
        help="defaults for the flags of the network; flags on the command line override them",
    )
    parser.add_argument(
        "--yaml-cfg",
        metavar="FILE",
        help="settings in Megatron-LM's YAML; flags on the command line override them",
    )
    names = {"moevement_strategy": tuple(STRATEGIES)}
    for title, group in GROUPS.values():
        add_flags(parser, title, group, names)
    add_flags(parser, "data", DataFlags)
    add_flags(parser, "logging", LoggingConfig)
    return parser


def parse(argv: Sequence[str], processes: int, launched: int | None = None) -> Arguments:
    """Parses and checks the command line of a job.

    Args:
        processes: of the job, spares counted.
        launched: how many of them train, unless a flag says otherwise (default: all).

    Raises:
        UserError: a flag is unknown, missing, out of range, or contradicts another one.
    """
    parser = build_parser()
    resolved = accepted(with_yaml(argv, parser.flags), parser)
    given = parser.parse_known_args(resolved.rest)[0]
    if given.model_preset is not None:
        parser.set_defaults(**PRESETS[given.model_preset])
    if given.use_checkpoint_args and given.load is not None:
        parser.set_defaults(**network_in(given.load, given.ckpt_step))
    values = parser.parse_args(resolved.rest)
    topics = {name: read_flags(group, values) for name, (_, group) in GROUPS.items()}
    topics["fault_tolerance"] = topics["fault_tolerance"].resolved()
    ranks = topics["restart"].active_ranks(processes, processes if launched is None else launched)
    arguments = Arguments(
        **topics,
        data=DataConfig.from_args(values),
        logging=LoggingConfig.from_args(values),
        world_size=ranks,
        without_effect=resolved.without_effect,
    )
    arguments = _settled(arguments)
    _check(arguments)
    return arguments


def _settled(arguments: Arguments) -> Arguments:
    """Returns the arguments with what other flags decide: samples counted as iterations."""
    parallelism, without_effect = arguments.parallelism, arguments.without_effect
    if parallelism.sequence_parallel and parallelism.tensor_model_parallel_size == 1:
        # Nothing is split over one rank; Megatron-LM drops the flag, too.
        parallelism = dataclasses.replace(parallelism, sequence_parallel=False)
        without_effect = (*without_effect, "--sequence-parallel")
    return dataclasses.replace(
        arguments,
        parallelism=parallelism,
        run=in_iterations(arguments.run, parallelism.data_parallel_size(arguments.world_size)),
        without_effect=without_effect,
    )


def _check(arguments: Arguments) -> None:
    """Checks each topic alone, then what several of them must agree in."""
    world_size = arguments.world_size
    check_restart(arguments.restart)
    check_rank_monitoring(arguments.monitoring, arguments.checkpointing.save)
    check_architecture(arguments.architecture, arguments.moe)
    check_parallelism(arguments.parallelism, arguments.architecture, arguments.moe, world_size)
    check_precision(arguments.precision)
    check_run(arguments.run, arguments.parallelism.data_parallel_size(world_size))
    check_optimization(arguments.optimization, arguments.run)
    check_checkpointing(arguments.checkpointing)
    check_fault_tolerance(arguments.fault_tolerance, arguments.checkpointing.save)
    check_fault_injection(
        arguments.fault_injection, world_size, int(arguments.run.train_iters or 0)
    )
    check_positions(arguments.data, arguments.architecture.position_embedding_type)
    _check_sequence(arguments)
    _check_interleaving(arguments)


def _check_sequence(arguments: Arguments) -> None:
    length = arguments.data.seq_length
    longest = arguments.architecture.max_position_embeddings
    if longest is not None and longest < length:
        raise UserError(f"--seq-length {length} exceeds --max-position-embeddings {longest}")
    tp = arguments.parallelism.tensor_model_parallel_size
    if arguments.parallelism.sequence_parallel and length % tp:
        raise UserError(
            f"--sequence-parallel: --seq-length {length} is no multiple of "
            f"--tensor-model-parallel-size {tp}"
        )


def _check_interleaving(arguments: Arguments) -> None:
    parallelism = arguments.parallelism
    if parallelism.virtual_stages(int(arguments.architecture.num_layers or 0)) is None:
        return
    stages = parallelism.pipeline_model_parallel_size
    count = num_microbatches(arguments.run, parallelism.data_parallel_size(arguments.world_size))
    if count % stages:
        raise UserError(
            f"an interleaved schedule needs a multiple of {stages} micro-batches (the pipeline "
            f"stages) and --global-batch-size gives {count}"
        )
