# SPDX-License-Identifier: Apache-2.0
"""Profiles some iterations as Megatron-LM's `--profile` does, for Nsight Systems or with torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from megatron_moevement.settings.profiling import ProfilingConfig

logger = logging.getLogger(__name__)


class Profiling:
    """Profiles the iterations of one rank; the training thread calls it around each.

    A restart that comes back to iterations which were profiled profiles them again.
    """

    def __init__(
        self, config: ProfilingConfig, rank: int, device: torch.device, folder: str | None
    ) -> None:
        """Prepares; nothing is recorded yet.

        Args:
            folder: for the trace of torch's profiler.
        """
        self._config = config
        self._is_on = config.includes(rank)
        self._folder = folder
        self._trace: profile | None = None
        self._is_capturing = False
        self._has_gpu = device.type == "cuda"
        if self._is_on and not config.use_pytorch_profiler and not self._has_gpu:
            self._is_on = False
            logger.info("--profile marks a range on a GPU, and there is none here")

    def begin_step(self, committed: int) -> None:
        """Starts before the first of the iterations; torch warms up in the one before.

        Args:
            committed: iterations before this one.
        """
        start = self._config.profile_step_start
        if not self._is_on or not start - 1 <= committed <= start:
            return
        if self._config.use_pytorch_profiler:
            if self._trace is None:
                self._trace = self._tracer(warmup=start - committed)
                self._trace.start()
        elif committed == start:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._is_capturing = True

    def _tracer(self, warmup: int) -> profile:
        assert self._folder is not None
        active = self._config.profile_step_end - self._config.profile_step_start
        return profile(
            schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
            record_shapes=True,
            with_stack=True,
            on_trace_ready=tensorboard_trace_handler(self._folder),
        )

    def end_step(self, committed: int) -> None:
        """Stops after the last of the iterations.

        Args:
            committed: iterations up to and with this one.
        """
        if self._trace is not None:
            self._write(self._trace.step)
        if committed == self._config.profile_step_end:
            self.close()

    def close(self) -> None:
        """Stops, and writes what was recorded, if anything is recorded."""
        trace, self._trace = self._trace, None
        if trace is not None:
            self._write(trace.stop)
        self._end_capture()

    def drop(self) -> None:
        """Stops where training has failed: nothing is written, and no kernel is waited for.

        One may wait for ranks that wait for this one.
        """
        trace, self._trace = self._trace, None
        if trace is not None:
            torch._C._autograd._disable_profiler()  # noqa: SLF001  (`stop` waits for the device)
        self._end_capture()

    def _write(self, call: Callable[[], None]) -> None:
        """Makes a call that may write the trace: a full disk ends no training."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  (torch and the disk raise what they like)
            self._trace = None
            logger.warning("no trace in %s: %s", self._folder, error)

    def _end_capture(self) -> None:
        if self._is_capturing:
            self._is_capturing = False
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
