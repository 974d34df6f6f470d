# SPDX-License-Identifier: Apache-2.0
"""The command line of `pretrain_moe.py`: Megatron-LM's flags, and ours as `--moevement-*`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.transformer_options import TransformerOptions
from megatron_moevement.settings.architecture import (
    Architecture,
    MixtureOfExperts,
    check_architecture,
    check_sizes,
)
from megatron_moevement.settings.checkpointing import Checkpointing, check_checkpointing
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.completion import add_completion
from megatron_moevement.settings.fault_injection import FaultInjection, check_fault_injection
from megatron_moevement.settings.fault_tolerance import FaultTolerance, check_fault_tolerance
from megatron_moevement.settings.flags import add_flags, read_flags
from megatron_moevement.settings.optimization import Optimization, check_optimization
from megatron_moevement.settings.parallelism import Parallelism, check_parallelism, check_world
from megatron_moevement.settings.parser import UserParser, add_version
from megatron_moevement.settings.precision import Precision, check_precision
from megatron_moevement.settings.profiling import ProfilingConfig
from megatron_moevement.settings.rank_monitor import RankMonitoring, check_rank_monitoring
from megatron_moevement.settings.restart import InProcessRestart, check_restart
from megatron_moevement.settings.run import (
    Run,
    check_batches,
    check_run,
    in_iterations,
    num_microbatches,
)
from megatron_moevement.strategies.registry import STRATEGIES
from megatron_moevement.training.checkpoint_arguments import network_in
from megatron_moevement.training.data.arguments import DataConfig, DataFlags, check_positions
from megatron_moevement.training.presets import PRESETS
from megatron_moevement.training.refusals import Resolved, check_covered, resolve
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

FLAG_GROUPS: Sequence[tuple[str, type[Any]]] = (
    *GROUPS.values(),
    ("data", DataFlags),
    ("logging", LoggingConfig),
    ("profiling", ProfilingConfig),
)
"""All titles and groups of `--help`."""


@dataclasses.dataclass(frozen=True)
class Topics:
    """What the command line says, but for data and reports."""

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


@dataclasses.dataclass(frozen=True)
class Arguments(Topics):
    """Everything the command line says, by topic, and how many ranks train.

    Attributes:
        without_effect: flags of Megatron-LM that were given and change nothing here.
    """

    data: DataConfig
    logging: LoggingConfig
    profiling: ProfilingConfig
    world_size: int
    without_effect: tuple[str, ...] = ()


def build_parser() -> UserParser:
    """Returns the parser of all flags."""
    parser = UserParser(prog="pretrain_moe.py", description=__doc__)
    add_version(parser)
    add_completion(parser, is_launched=True)
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
    for title, group in FLAG_GROUPS:
        add_flags(parser, title, group, names)
    return parser


def parse(argv: Sequence[str], processes: int, launched: int | None = None) -> Arguments:
    """Parses and checks the command line of a job.

    Args:
        processes: of the job, spares counted.
        launched: how many of them train, unless a flag says otherwise (default: all).

    Raises:
        UserError: a flag is unknown, missing, out of range, or contradicts another one; what can
            be found at once has a message each.
    """
    parser = build_parser()
    resolved = resolve(with_yaml(argv, parser.flags), parser.flags)
    given = _read(parser, resolved)
    if given.model_preset is not None:
        parser.set_defaults(**PRESETS[given.model_preset])
    if given.use_checkpoint_args and given.load is not None:
        parser.set_defaults(**network_in(given.load, given.ckpt_step))
    values = parser.parse_args(resolved.rest)
    topics = Topics(**{name: read_flags(group, values) for name, (_, group) in GROUPS.items()})
    topics = dataclasses.replace(topics, fault_tolerance=topics.fault_tolerance.resolved())
    without_effect = resolved.without_effect
    if topics.parallelism.sequence_parallel and topics.parallelism.tensor_model_parallel_size == 1:
        # Nothing is split over one rank; Megatron-LM drops the flag, too.
        dropped = dataclasses.replace(topics.parallelism, sequence_parallel=False)
        topics = dataclasses.replace(topics, parallelism=dropped)
        without_effect = (*without_effect, "--sequence-parallel")
    checks = Checks()
    data = checks.result(DataConfig.from_args, values)
    logging = checks.result(LoggingConfig.from_args, values)
    profiling = checks.result(ProfilingConfig.from_args, values)
    launched = processes if launched is None else launched
    ranks = checks.result(topics.restart.active_ranks, processes, launched)
    topics = _check(checks, topics, data, ranks)
    checks.end()
    assert data is not None
    assert logging is not None
    assert profiling is not None
    assert ranks is not None
    return Arguments(
        **vars(topics),
        data=data,
        logging=logging,
        profiling=profiling,
        world_size=ranks,
        without_effect=without_effect,
    )


def _read(parser: UserParser, resolved: Resolved) -> argparse.Namespace:
    """Returns what was given, without what it implies.

    Contradictions are looked for later: a value that is refused has others that are none.

    Raises:
        UserError: with all flags and values that are refused.
    """
    checks = Checks()
    checks.passes(check_covered, resolved, parser)
    given, unknown, wrong = parser.read(resolved.rest)
    for message in wrong:
        checks.refuse(message)
    if unknown and not resolved.refused:
        checks.passes(parser.refuse_unknown, unknown)
    checks.end()
    return given


def _check(checks: Checks, topics: Topics, data: DataConfig | None, ranks: int | None) -> Topics:
    """Checks each topic alone, then what several of them must agree in.

    Args:
        data: None if they are refused.
        ranks: that train; None if they are refused.

    Returns:
        The topics, with the length of the run in iterations.
    """
    checks.passes(check_restart, topics.restart)
    checks.passes(check_rank_monitoring, topics.monitoring, topics.checkpointing.save)
    checks.passes(check_precision, topics.precision)
    checks.passes(check_checkpointing, topics.checkpointing)
    checks.passes(check_fault_tolerance, topics.fault_tolerance, topics.checkpointing.save)
    divides = ranks is not None and checks.passes(check_world, topics.parallelism, ranks)
    fits = False
    if checks.passes(check_sizes, topics.architecture):
        network = (topics.architecture, topics.moe)
        checks.passes(check_architecture, *network)
        fits = checks.passes(check_parallelism, topics.parallelism, *network)
    if data is not None:
        checks.passes(check_positions, data, topics.architecture.position_embedding_type)
        checks.passes(_check_length, topics.architecture, data.seq_length)
        checks.passes(_check_sequence, topics.parallelism, data.seq_length)
    if ranks is None or not divides:
        return topics  # batches might be divided among no ranks
    return _check_run(checks, topics, ranks, fits=fits)


def _check_run(checks: Checks, topics: Topics, ranks: int, *, fits: bool) -> Topics:
    """Checks what depends on the length of the run, and on batches.

    Args:
        fits: whether the network can be spread over ranks.

    Returns:
        The topics, with that length in iterations.
    """
    data_parallel_size = topics.parallelism.data_parallel_size(ranks)
    run = checks.result(in_iterations, topics.run, data_parallel_size)
    if run is None:
        return topics
    topics = dataclasses.replace(topics, run=run)
    whole = checks.passes(check_run, run)
    if run.train_iters is not None:
        checks.passes(check_optimization, topics.optimization, run)
        checks.passes(check_fault_injection, topics.fault_injection, ranks, run.train_iters)
    if whole and checks.passes(check_batches, run, data_parallel_size) and fits:
        checks.passes(_check_interleaving, topics, data_parallel_size)
    return topics


def _check_length(architecture: Architecture, length: int) -> None:
    longest = architecture.max_position_embeddings
    if longest is not None and longest < length:
        raise UserError(f"--seq-length {length} exceeds --max-position-embeddings {longest}")


def _check_sequence(parallelism: Parallelism, length: int) -> None:
    tp = parallelism.tensor_model_parallel_size
    if parallelism.sequence_parallel and length % tp:
        raise UserError(
            f"--sequence-parallel: --seq-length {length} is no multiple of "
            f"--tensor-model-parallel-size {tp}"
        )


def _check_interleaving(topics: Topics, data_parallel_size: int) -> None:
    if topics.parallelism.virtual_stages(int(topics.architecture.num_layers or 0)) is None:
        return
    stages = topics.parallelism.pipeline_model_parallel_size
    count = num_microbatches(topics.run, data_parallel_size)
    if count % stages:
        raise UserError(
            f"an interleaved schedule needs a multiple of {stages} micro-batches (the pipeline "
            f"stages) and --global-batch-size gives {count}"
        )
