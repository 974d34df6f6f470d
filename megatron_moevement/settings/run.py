# SPDX-License-Identifier: Apache-2.0
"""One run: its batches, its length, its seed and its ends."""

from __future__ import annotations

import dataclasses

from megatron_moevement.backends.backend import BackendName
from megatron_moevement.errors import UserError
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import SEED, count, flag, not_negative, positive


@dataclasses.dataclass(frozen=True)
class Run:
    """Batches, length and ends of a run."""

    micro_batch_size: int | None = count(None, "samples per forward pass of a rank")
    global_batch_size: int | None = count(None, "samples per iteration of the job")
    train_iters: int | None = count(None, "iterations of training")
    train_samples: int | None = count(None, "samples of training, instead of --train-iters")
    eval_interval: int = count(1000, "iterations between evaluations")
    eval_iters: int = not_negative(100, "iterations of one evaluation; 0: none")
    exit_interval: int | None = count(None, "save and exit after an iteration divisible by this")
    exit_duration_in_mins: float | None = positive(None, "save and exit after this many minutes")
    manual_gc: bool = flag(False, "collect garbage at the same steps on all ranks")
    manual_gc_interval: int = not_negative(0, "steps between these collections; 0: at start alone")
    seed: int = flag(1234, "seed of weights, dropout and data order", within=SEED)
    deterministic_mode: bool = flag(False, "deterministic kernels only; same bits every time")
    moevement_backend: BackendName | None = flag(
        None, "the device to train on (default: cuda where there is a GPU)"
    )
    moevement_state_digest: str | None = flag(
        None, "write a digest of the final state to this file", metavar="FILE"
    )


def check_run(run: Run) -> None:
    """Checks batches and lengths alone.

    Raises:
        UserError: a value is missing.
    """
    checks = Checks()
    for name in ("micro_batch_size", "train_iters"):
        if getattr(run, name) is None:
            checks.refuse(f"--{name.replace('_', '-')} is missing")
    if run.manual_gc_interval and not run.manual_gc:
        checks.refuse("--manual-gc-interval needs --manual-gc")
    checks.end()


def check_batches(run: Run, data_parallel_size: int) -> None:
    """Checks that batches can be divided among ranks; the run has its values.

    Raises:
        UserError: they can't.
    """
    per_step = int(run.micro_batch_size or 0) * data_parallel_size
    if run.global_batch_size is None:
        return
    if run.global_batch_size % per_step:
        raise UserError(
            f"--global-batch-size {run.global_batch_size} is no multiple of --micro-batch-size "
            f"{run.micro_batch_size} x data-parallel size {data_parallel_size}"
        )


def in_iterations(run: Run, data_parallel_size: int) -> Run:
    """Returns the run with the length in iterations, where it is given in samples.

    Raises:
        UserError: both are given, or the samples make no iteration.
    """
    if run.train_samples is None:
        return run
    if run.train_iters is not None:
        raise UserError("--train-samples and --train-iters exclude each other; give one of them")
    per_step = num_microbatches(run, data_parallel_size) * (
        int(run.micro_batch_size or 0) * data_parallel_size
    )
    if run.micro_batch_size is not None and per_step > run.train_samples:
        raise UserError(
            f"--train-samples {run.train_samples} are less than an iteration's {per_step}"
        )
    return dataclasses.replace(run, train_iters=run.train_samples // max(1, per_step))


def num_microbatches(run: Run, data_parallel_size: int) -> int:
    """Returns the micro-batches of one iteration on each rank."""
    per_step = int(run.micro_batch_size or 0) * data_parallel_size
    return int(run.global_batch_size or per_step) // max(1, per_step)
