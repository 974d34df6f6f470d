# SPDX-License-Identifier: Apache-2.0
"""Who watches this process from outside, by the arguments."""

from __future__ import annotations

from megatron_moevement.runtime.observation.watch import Watch
from megatron_moevement.training.arguments import Arguments


def open_watch(arguments: Arguments) -> Watch:
    """Returns what tells the rank monitor of `ft_launcher` what this process does; close it.

    Raises:
        UserError: there is no monitor, or its limits don't fit.
    """
    from megatron_moevement.integrations.nvrx.rank_monitor import RankMonitor  # noqa: PLC0415

    return RankMonitor(arguments.monitoring, arguments.restart, arguments.checkpointing.save)
