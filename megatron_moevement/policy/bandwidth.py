"""Bandwidth: what a rank can copy in one iteration, and when that calls for another window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta


@dataclasses.dataclass(frozen=True)
class PathBandwidth:
    """The whole path of a slot: from the device to the host, and over the network to r holders.

    Attributes:
        device_to_host_bytes_per_s: measured, shared with the upstream log.
        network_bytes_per_s: measured, of this rank's share of its node's links.
        replicas: r, the copies that are sent.
        log_bytes: bytes that the upstream log copies to the host in each iteration.

    Raises:
        ValueError: a bandwidth is not positive or a number is negative.
    """

    device_to_host_bytes_per_s: float
    network_bytes_per_s: float
    replicas: int
    log_bytes: int = 0

    def __post_init__(self) -> None:
        if self.device_to_host_bytes_per_s <= 0 or self.network_bytes_per_s <= 0:
            raise ValueError(f"bandwidths must be positive: {self}")
        if self.replicas < 0 or self.log_bytes < 0:
            raise ValueError(f"replicas and log bytes must not be negative: {self}")

    def slot_budget_bytes(self, iteration: timedelta) -> int:
        """Returns the bytes of the largest slot that one iteration hides.

        Both legs run while the next iteration computes: the copy to the host beside the log, and
        the sending of r copies.
        """
        seconds = iteration.total_seconds()
        to_host = self.device_to_host_bytes_per_s * seconds - self.log_bytes
        if self.replicas:
            to_host = min(to_host, self.network_bytes_per_s * seconds / self.replicas)
        return max(int(to_host), 0)


@dataclasses.dataclass(frozen=True)
class Hysteresis:
    """How sluggish the controller is.

    Attributes:
        patience: windows in a row that must call for a change in the same direction.
        headroom: part of the iteration that a slot of a shorter window must leave free.
        smoothing: weight of the newest measurement in the running mean, `0 < smoothing <= 1`.

    Raises:
        ValueError: a setting lies outside of its range.
    """

    patience: int = 3
    headroom: float = 0.1
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        if self.patience < 1 or not 0 <= self.headroom < 1 or not 0 < self.smoothing <= 1:
            raise ValueError(f"patience >= 1, 0 <= headroom < 1, 0 < smoothing <= 1: {self}")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What the job measured over one window, reduced so that all ranks have the same.

    Attributes:
        bytes_per_s: bandwidth of the slowest rank over the whole path.
        iteration: mean time of an iteration without stalls.
    """

    bytes_per_s: float
    iteration: timedelta


@dataclasses.dataclass(frozen=True)
class ControllerState:
    """What the controller remembers from window edge to window edge.

    Attributes:
        budget_bytes: running mean of the bytes that an iteration hides; None before the first.
        direction: 1 while longer windows are called for, -1 while shorter ones are, else 0.
        streak: window edges in a row that called for that direction.
    """

    budget_bytes: float | None = None
    direction: int = 0
    streak: int = 0


def propose_window(
    state: ControllerState,
    measurement: Measurement,
    window: int,
    worst_slot_bytes: Mapping[int, int],
    hysteresis: Hysteresis,
) -> tuple[ControllerState, int | None]:
    """Decides at a window edge whether another W is called for.

    A longer window is called for when the worst slot no longer fits behind an iteration, a shorter
    one when its worst slot would leave `headroom` free; the change is proposed when `patience`
    edges in a row agree on its direction. Between the two thresholds nothing moves. Every rank
    calls it with the same arguments; the proposal takes effect at the edge that the commit barrier
    names.

    Args:
        state: what the former call returned; `ControllerState()` at first and after each change.
        measurement: of the window that has just ended.
        window: W in force.
        worst_slot_bytes: for each W that may be chosen the largest slot of the worst rank.
        hysteresis: how sluggish to be.

    Returns:
        The state for the next edge, and the proposed W, None to stay.
    """
    fresh = measurement.bytes_per_s * measurement.iteration.total_seconds()
    weight = 1.0 if state.budget_bytes is None else hysteresis.smoothing
    budget = weight * fresh + (1 - weight) * (state.budget_bytes or 0.0)
    wanted = _wanted_window(window, worst_slot_bytes, budget, hysteresis.headroom)
    direction = (wanted > window) - (wanted < window)
    streak = state.streak + 1 if direction == state.direction else 1
    if direction and streak >= hysteresis.patience:
        return ControllerState(budget), wanted
    return ControllerState(budget, direction, streak if direction else 0), None


def _wanted_window(
    window: int, worst_slot_bytes: Mapping[int, int], budget: float, headroom: float
) -> int:
    """Returns the W that suits a budget, `window` itself while it does."""
    if worst_slot_bytes[window] > budget:
        longer = sorted(w for w in worst_slot_bytes if w > window)
        fitting = [w for w in longer if worst_slot_bytes[w] <= budget]
        best = min(longer, key=lambda w: (worst_slot_bytes[w], w), default=window)
        if fitting:
            return fitting[0]
        return best if worst_slot_bytes[best] < worst_slot_bytes[window] else window
    roomy = budget * (1 - headroom)
    return min(
        (w for w in worst_slot_bytes if w < window and worst_slot_bytes[w] <= roomy), default=window
    )
