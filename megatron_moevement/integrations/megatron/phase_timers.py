# SPDX-License-Identifier: Apache-2.0
"""Megatron's timers of the phases of a step (`--timing-log-level`)."""

from __future__ import annotations

from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig


class PhaseTimers:
    """Times the phases that Megatron-Core names; used by the training thread of every rank.

    At level 0 Megatron times nothing that costs a barrier, so nothing is attached.
    """

    def __init__(self, config: TransformerConfig, log_level: int, log_option: str) -> None:
        """Attaches timers to a config that is not in use yet."""
        self._timers = Timers(log_level, log_option) if log_level else None
        config.timers = self._timers

    def forget(self) -> None:
        """Makes every timer a stopped one that has measured nothing, after an interrupt."""
        if self._timers is None:
            return
        for timer in self._timers._timers.values():  # noqa: SLF001
            timer._started = False  # noqa: SLF001  (upstream refuses to start it twice)
            timer.reset()

    def report(self, iterations: int) -> str | None:
        """Returns the times per iteration since the last call; every rank calls it.

        Returns:
            The text on the last rank; None elsewhere, and where nothing is timed.
        """
        if self._timers is None:
            return None
        names = list(self._timers._timers)  # noqa: SLF001  (upstream lists them in its loop)
        text: str | None = self._timers.get_all_timers_string(names, normalizer=iterations)
        return text
