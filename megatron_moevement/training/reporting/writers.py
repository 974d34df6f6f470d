# SPDX-License-Identifier: Apache-2.0
"""Scalars for TensorBoard and Weights & Biases, written on the last rank only."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_moevement.errors import UserError
from megatron_moevement.training.reporting import recovery_scalars
from megatron_moevement.training.reporting.arguments import LoggingConfig
from megatron_moevement.training.reporting.wandb_run import (
    NO_LATER_LAUNCH,
    WandbRun,
    init_arguments,
)

SAMPLES_SUFFIX = " vs samples"
"""Ends the name of a scalar that is drawn over consumed samples instead of iterations."""


class ScalarWriter(Protocol):
    """Takes scalars; used by the training thread."""

    def add_scalar(self, name: str, value: float, step: int, /) -> None:
        """Adds one point; `step` is an iteration, or consumed samples (`SAMPLES_SUFFIX`)."""

    def flush(self) -> None:
        """Writes out what was added."""

    def close(self) -> None:
        """Writes out what was added and lets go of everything."""


class WandbWriter:
    """Sends scalars to Weights & Biases, to one run over restarts and launches of a job."""

    def __init__(self, config: LoggingConfig, run: WandbRun, directory: str) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run: Any = self._wandb.init(**init_arguments(config, run, directory, os.environ))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds one point; Weights & Biases has one axis only, the iterations, and never goes back.

        Steps that a job repeats are left out, as they are there already. A recovery that led back
        to an earlier one comes with the newest.
        """
        newest = int(self._run.step)
        if name.startswith(recovery_scalars.PREFIX):
            step = max(step, newest)
        if step >= newest and not name.endswith(SAMPLES_SUFFIX):
            self._run.log({name: value}, step=step)

    def flush(self) -> None:
        """Does nothing: a thread of Weights & Biases sends."""

    def close(self) -> None:
        """Ends the run, and the service process that would else stay until this process ends."""
        self._run.finish()
        self._wandb.teardown()


class ScalarWriters:
    """Several writers as one; none at all is fine."""

    def __init__(self, writers: Sequence[ScalarWriter] = ()) -> None:
        self._writers = tuple(writers)

    def __bool__(self) -> bool:
        return bool(self._writers)

    def add(self, scalars: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Adds points over iterations and, where `samples` is given, over samples too."""
        for writer in self._writers:
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
                if samples is not None:
                    writer.add_scalar(name + SAMPLES_SUFFIX, value, samples)

    def flush(self) -> None:
        """Writes out what was added."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Closes all writers, also when one of them fails to."""
        with contextlib.ExitStack() as closing:
            for writer in reversed(self._writers):
                closing.callback(writer.close)
        self._writers = ()


def open_writers(
    config: LoggingConfig, save: str | None, run: WandbRun = NO_LATER_LAUNCH
) -> ScalarWriters:
    """Opens the writers that are asked for; the last rank calls it.

    Args:
        save: folder of the checkpoints.
        run: the job as Weights & Biases is to show it.

    Raises:
        UserError: a writer can't be opened.
    """
    writers: list[ScalarWriter] = []
    if config.tensorboard_dir is not None:
        writers.append(_open_tensorboard(config.tensorboard_dir, config.tensorboard_queue_size))
    if config.wandb_project:
        directory = config.wandb_save_dir or str(Path(save or ".") / "wandb")
        Path(directory).mkdir(parents=True, exist_ok=True)
        writers.append(WandbWriter(config, run, directory))
    return ScalarWriters(writers)


def _open_tensorboard(directory: str, queue_size: int) -> ScalarWriter:
    """Opens an event file of its own, whatever other processes wrote to the folder before.

    Raises:
        UserError: TensorBoard is not installed, or the folder can't be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (takes seconds)
    except ImportError as error:
        raise UserError(
            f"--tensorboard-dir {directory}: tensorboard is not installed; "
            "pip install tensorboard, or drop the flag"
        ) from error
    try:
        writer: ScalarWriter = SummaryWriter(log_dir=directory, max_queue=queue_size)
    except OSError as error:
        raise UserError(
            f"--tensorboard-dir {directory}: {error.strerror}; give a writable folder"
        ) from error
    return writer
