# SPDX-License-Identifier: Apache-2.0
"""The meter of a simulated rank: how long its slots take, and what it waits for."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from megatron_moevement.policy.watching.measurements import (
    NOT_MEASURED,
    CpuTimes,
    Measured,
    MeasuredStep,
    Reduced,
    Work,
)
from megatron_moevement.testing.world.conditions import Cores

UNIT_S = 0.001
"""Seconds of a unit of the world's time, for whoever measures."""


@dataclasses.dataclass
class Meter:
    """Of one rank in one generation; it notes what the profiler of a real rank does.

    Attributes:
        captured: slots that were copied to the host.
        sent: the copies that each holder has taken.
        steps: since the last measurement.
        ended: when the newest step came to its barrier.
        burden: that captures have taken in these steps.
        is_warm: whether anything was measured before.
        has_trouble: whether a transfer has failed since then.
    """

    captured: list[Work] = dataclasses.field(default_factory=list)
    sent: dict[int, list[Work]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    steps: list[MeasuredStep] = dataclasses.field(default_factory=list)
    ended: float | None = None
    burden: float = 0.0
    is_warm: bool = False
    has_trouble: bool = False

    def step_ends(self, now: float, stall: float, *, is_in_trouble: bool) -> None:
        """Notes that a step has come to its barrier, after waiting for copies."""
        if self.ended is not None:
            self.steps.append(MeasuredStep((now - self.ended) * UNIT_S, stall * UNIT_S))
        self.ended = now
        self.has_trouble = self.has_trouble or is_in_trouble

    def measured(self, holders: Iterable[int], cores: Cores) -> Reduced:
        """Returns what was measured since the last call."""
        steps, is_warm, has_trouble = self.steps, self.is_warm, self.has_trouble
        burden, self.burden = self.burden, 0.0
        self.steps, self.is_warm, self.has_trouble = [], True, False
        if not is_warm or has_trouble or not steps:
            return NOT_MEASURED
        contention = _cpu_times(steps, burden * UNIT_S, cores).contention(_NONE)
        sent = [self.sent[holder] for holder in holders]
        return Measured.of(self.captured, sent, steps, contention).vote


_NONE = CpuTimes({}, 0.0, 0.0, 0.0, waited_s={})


def _cpu_times(steps: Sequence[MeasuredStep], burden_s: float, cores: Cores) -> CpuTimes:
    """Returns the CPU times of steps, of a rank with a core that one thread trains on."""
    all_s = sum(step.duration_s for step in steps)
    return CpuTimes(
        {0: burden_s},
        all_s - sum(step.stall_s for step in steps),
        all_s if cores is Cores.IDLE else 0.0,
        all_s,
        all_s,
        {1: 0.0 if cores is Cores.YIELDED else burden_s},
        {1},
    )
