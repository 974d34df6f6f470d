# SPDX-License-Identifier: Apache-2.0
"""The flags of reporting, under Megatron-LM's names, and their checked values."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util

from megatron_moevement.errors import UserError
from megatron_moevement.policy.accounting.event_interval import (
    LONGER,
    MOST_RANKS_WITH_EVERY_STEP,
    event_interval,
)
from megatron_moevement.runtime.observation.events import Recording
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import flag, read_flags


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """What is reported, how often and where to."""

    log_interval: int = flag(100, "iterations between iteration lines")
    log_throughput: bool = flag(False, "TFLOP/s per GPU in the iteration line")
    log_num_zeros_in_grad: bool = flag(
        False, "zeros in the gradients, in the iteration line and as a scalar"
    )
    log_params_norm: bool = flag(
        False, "L2 norm of the weights, in the iteration line and as a scalar"
    )
    log_memory_interval: int | None = flag(
        None, "iterations between lines with the memory of each model-parallel rank"
    )
    log_device_memory_used: bool = flag(
        False, "what all processes use of the GPU, by NVML, in the line of --log-memory-interval"
    )
    log_progress: bool = flag(False, "append to progress.txt in --save at each checkpoint")
    timing_log_level: int = flag(0, "time the phases of a step: 0 none, 1 few, 2 all")
    timing_log_option: str = flag(
        "minmax", "which ranks' times are reported", choices=("max", "minmax", "all")
    )
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard", metavar="DIR")
    tensorboard_log_interval: int = flag(1, "iterations between points in TensorBoard")
    tensorboard_queue_size: int = flag(1000, "points held back until they are written")
    log_timers_to_tensorboard: bool = flag(False, "iteration time and throughput as scalars")
    log_memory_to_tensorboard: bool = flag(False, "memory in use as scalars")
    log_loss_scale_to_tensorboard: bool = flag(True, "no loss scale among the scalars")
    log_validation_ppl_to_tensorboard: bool = flag(False, "validation perplexity as a scalar")
    log_world_size_to_tensorboard: bool = flag(False, "number of ranks as a scalar")
    wandb_project: str = flag("", "project in Weights & Biases; none: nothing goes there")
    wandb_entity: str = flag("", "entity in Weights & Biases")
    wandb_exp_name: str = flag("", "name of the run in Weights & Biases")
    wandb_save_dir: str = flag("", "folder of Weights & Biases (default: in --save)")
    moevement_event_dir: str | None = flag(
        None, "write events as JSON lines, a file for each process", metavar="DIR"
    )
    moevement_event_interval: int | None = flag(
        None,
        "iterations that one event of a process stands for; faults are written at once "
        f"(default: 1, with more than {MOST_RANKS_WITH_EVERY_STEP} ranks {LONGER})",
        metavar="ITERATIONS",
    )
    moevement_event_bytes: int = flag(
        1 << 26,
        "about how many bytes the events of one process take; of older ones only sums are kept",
        metavar="BYTES",
    )
    logging_level: int = flag(
        20, "least level of lines on standard error: 10 debug, 20 info, 30 warning, 40 error"
    )
    moevement_no_progress_bar: bool = flag(False, "no progress bar on the terminal")

    def recording(self, ranks: int) -> Recording:
        """Returns how much a process of a job of so many ranks records of events."""
        given = self.moevement_event_interval
        interval = event_interval(ranks) if given is None else given
        return Recording(interval, self.moevement_event_bytes)

    @classmethod
    def from_args(cls, values: argparse.Namespace) -> LoggingConfig:
        """Returns the checked values of parsed arguments.

        Raises:
            UserError: a value is out of range, or Weights & Biases is asked for and missing.
        """
        checks = Checks()
        config = read_flags(cls, values)
        for name, least in _LEAST.items():
            value = getattr(config, name)
            if value is not None and value < least:
                option = f"--{name.replace('_', '-')}"
                checks.refuse(f"{option} {value} must be at least {least}")
        if config.timing_log_level not in range(3):
            checks.refuse(f"--timing-log-level {config.timing_log_level} must be 0, 1 or 2")
        if not 0 <= config.logging_level <= 50:
            checks.refuse(f"--logging-level {config.logging_level} must be from 0 to 50")
        checks.passes(_check_wandb, config)
        checks.end()
        return config


_LEAST = {
    "log_interval": 1,
    "log_memory_interval": 1,
    "tensorboard_log_interval": 1,
    "tensorboard_queue_size": 1,
    "moevement_event_interval": 1,
    "moevement_event_bytes": 1 << 16,
}


def _check_wandb(config: LoggingConfig) -> None:
    if not config.wandb_project:
        return
    if not config.wandb_exp_name:
        raise UserError("--wandb-project needs --wandb-exp-name NAME")
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"--wandb-project {config.wandb_project}: wandb is not installed; "
            "pip install wandb, or drop the flag"
        )
