# SPDX-License-Identifier: Apache-2.0
"""Window forecast: what each W would cost on a path of known bandwidth, and which one is chosen."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.copies.retention import LAG, max_replayed_steps
from megatron_moevement.policy.preflight.forecast import WindowOptions
from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.policy.watching.window_choice import WindowChoice, path_of

_WINDOWS = 64
"""Windows after which W has settled where nothing changes."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bandwidths of the worst rank, as a job measures them.

    Attributes:
        to_host_bytes_per_s: of a slot's copy and its checksums, one after the other.
        to_holder_bytes_per_s: to the slowest holder, while the others are sent to; None: no copies
            are sent, or no network limits them.
    """

    to_host_bytes_per_s: float
    to_holder_bytes_per_s: float | None = None

    def measured(self, iteration_s: float = 0.0, stall_s: float = 0.0) -> Measured:
        """Returns what a job would measure."""
        return Measured(self.to_host_bytes_per_s, self.to_holder_bytes_per_s, iteration_s, stall_s)


@dataclasses.dataclass(frozen=True)
class WindowForecast:
    """What a W would cost.

    Attributes:
        slot_bytes: of the largest slot of the worst rank.
        replayed_steps: that a recovery replays at most, beside the interrupted one.
        hiding_s: the shortest iteration that hides its slots.
    """

    window: int
    slot_bytes: int
    replayed_steps: int
    hiding_s: float

    def stall_s(self, iteration_s: float) -> float:
        """Returns what an iteration waits for its largest slot."""
        return max(self.hiding_s - iteration_s, 0.0)


def forecast_windows(
    options: WindowOptions, rates: Rates, replicas: int
) -> tuple[WindowForecast, ...]:
    """Returns what each W would cost, the smallest first.

    Args:
        replicas: r.
    """
    path = path_of(rates.measured(), replicas)
    if path is None:
        return ()
    return tuple(
        WindowForecast(
            window,
            slot_bytes,
            max_replayed_steps(window, LAG),
            path.hiding_s(slot_bytes),
        )
        for window, slot_bytes in sorted(options.slots.items())
    )


def settled_choice(
    options: WindowOptions, rates: Rates, replicas: int, iteration_s: float
) -> WindowChoice:
    """Returns the choice that a job comes to whose iterations and bandwidths don't change.

    Args:
        replicas: r.
        iteration_s: of an iteration without stalls.
    """
    forecasts = {one.window: one for one in forecast_windows(options, rates, replicas)}
    choice = WindowChoice(options.first)
    for _ in range(_WINDOWS):
        # Empty slots after the used ones leave the link the time that it takes.
        is_spread = choice.used is not None
        stall_s = 0.0 if is_spread else forecasts[choice.window].stall_s(iteration_s)
        measured = rates.measured(iteration_s, stall_s)
        choice = choice.after(measured, options.slots, replicas)
    return choice
