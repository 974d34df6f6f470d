# SPDX-License-Identifier: Apache-2.0
"""The flags of profiling, under Megatron-LM's names, and their checked values."""

from __future__ import annotations

import argparse
import dataclasses

from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import flag, not_negative, read_flags


@dataclasses.dataclass(frozen=True)
class ProfilingConfig:
    """Which iterations of which ranks are profiled, and how."""

    profile: bool = flag(
        False, "profile some iterations: a range for nsys --capture-range=cudaProfilerApi"
    )
    profile_step_start: int = not_negative(10, "profile the iterations after this one")
    profile_step_end: int = flag(12, "the last iteration to profile")
    profile_ranks: tuple[int, ...] = flag(
        (), "ranks to profile (default: all)", parse=int, nargs="+", metavar="RANK"
    )
    use_pytorch_profiler: bool = flag(
        False, "profile with torch's profiler, into --tensorboard-dir, and not for nsys"
    )

    @classmethod
    def from_args(cls, values: argparse.Namespace) -> ProfilingConfig:
        """Returns the checked values of parsed arguments.

        Raises:
            UserError: no iteration is between the two, or a trace has no folder.
        """
        config, checks = read_flags(cls, values), Checks()
        if config.profile and config.profile_step_end <= config.profile_step_start:
            checks.refuse(
                f"--profile-step-end {config.profile_step_end} must be above "
                f"--profile-step-start {config.profile_step_start}"
            )
        if config.profile and config.use_pytorch_profiler and values.tensorboard_dir is None:
            checks.refuse("--use-pytorch-profiler writes its trace there: give --tensorboard-dir")
        checks.end()
        return config

    def includes(self, rank: int) -> bool:
        """Returns whether a rank is profiled."""
        return self.profile and (not self.profile_ranks or rank in self.profile_ranks)
