# SPDX-License-Identifier: Apache-2.0
"""Rank monitors: Megatron-LM's flags for the processes that `ft_launcher` starts beside ranks."""

from __future__ import annotations

import dataclasses

from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import flag, not_negative


@dataclasses.dataclass(frozen=True)
class RankMonitoring:
    """Signs of life for the rank monitors of `ft_launcher`; how long they wait is said there."""

    enable_ft_package: bool = flag(
        False,
        "send signs of life to the rank monitor of ft_launcher, which kills ranks that hang",
    )
    calc_ft_timeouts: bool = flag(
        False, "derive the monitor's section timeouts from the run; kept in --save"
    )
    ft_num_warmup_iters: int = not_negative(
        5, "steps of a process that the timeout of a step does not hold for"
    )


def check_rank_monitoring(settings: RankMonitoring, save: str | None) -> None:
    """Checks that one flag has the others that it needs.

    Raises:
        UserError: one is missing.
    """
    checks = Checks()
    if not settings.calc_ft_timeouts:
        return
    if not settings.enable_ft_package:
        checks.refuse("--calc-ft-timeouts: the ranks are not monitored; give --enable-ft-package")
    if save is None:
        checks.refuse("--calc-ft-timeouts keeps its limits in --save: give --save DIR")
    checks.end()
