# SPDX-License-Identifier: Apache-2.0
"""`progress.txt`: what each job with this `--save` did, kept over all its restarts.

Source: `append_to_progress_log` and `compute_throughputs_and_append_to_progress_log` of
megatron/training. Here rank 0 writes alone, without a barrier of the job.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path

from megatron_moevement.errors import UserError

logger = logging.getLogger(__name__)

FILE_NAME = "progress.txt"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_STARTING = "Starting job"
_SAVED = "Saved checkpoint"
_FLOPS = "Floating-point operations: "
_RANKS = "# GPUs: "


class ProgressLog:
    """The progress log of a folder; rank 0 uses it.

    Raises:
        UserError: the folder can't be written.
    """

    def __init__(self, save: str, world_size: int) -> None:
        self._path = Path(save) / FILE_NAME
        self._world_size = world_size
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._append(_STARTING, datetime.now())
        except OSError as error:
            raise UserError(
                f"--log-progress: {self._path}: {error.strerror}; give a writable --save"
            ) from error

    def checkpoint(
        self, iteration: int, now: datetime, *, job_tflops: float, flops: float, tokens: int
    ) -> None:
        """Appends the line of a saved checkpoint; a disk that fails costs this line only.

        Args:
            job_tflops: throughput for each GPU since this job started, in 1e12 FLOP/s.
            flops: operations of the training up to the checkpoint.
        """
        try:
            cumulative = cumulative_tflops_per_gpu(
                self._path.read_text(encoding="utf-8"), self._world_size, flops, now
            )
            self._append(
                f"{_SAVED}\tIteration: {iteration}\t"
                f"Job throughput: {job_tflops:.1f} TFLOP/s/GPU\t"
                f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
                f"{_FLOPS}{flops:.2e}\t"
                f"Tokens (in billions): {tokens / 10**9:.2f}",
                now,
            )
        except OSError as error:
            logger.warning("%s: %s; a line is lost", self._path, error.strerror)

    def _append(self, text: str, now: datetime) -> None:
        job_id = os.environ.get("SLURM_JOB_ID", "")
        line = f"{now:{_TIME_FORMAT}}\tJob ID: {job_id}\t{_RANKS}{self._world_size}\t{text}\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)


def cumulative_tflops_per_gpu(log: str, world_size: int, flops: float, now: datetime) -> float:
    """Returns the throughput since the first of the latest jobs of this size, time lost included.

    Args:
        log: text of a progress log that ends with jobs of `world_size` ranks.
        flops: operations of the training until now.
        now: the time until which is counted.
    """
    since: datetime | None = None
    flops_before = saved_flops = 0.0
    for line in log.splitlines():
        fields = line.split("\t")
        if len(fields) < 4:
            continue
        if fields[2] != f"{_RANKS}{world_size}":
            since = None
        elif fields[3] == _STARTING and since is None:
            since = datetime.strptime(fields[0], _TIME_FORMAT)
            flops_before = saved_flops
        if fields[3] == _SAVED:
            saved_flops = float(fields[7].removeprefix(_FLOPS))
    if since is None:
        return 0.0
    elapsed_s = max((now - since).total_seconds(), 1.0)  # the log's times are whole seconds
    return (flops - flops_before) / (elapsed_s * 1e12 * world_size)
