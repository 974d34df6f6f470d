# SPDX-License-Identifier: Apache-2.0
"""Invariants of upstream logs: whole when their step is committed, kept as long as needed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.violations import require

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


class LogInvariants:
    """Watches the logs of a world.

    Attributes:
        damaged: processes whose logs a fault has damaged.
        copied: processes that took S_k of a replica, with k: of the steps before they have no log.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.damaged: set[int] = set()
        self.copied: dict[int, int] = {}

    def begins(self, process: Process, step: int) -> None:
        """Checks, when a rank begins a step, that its log has a free buffer for it."""
        logs, capacity = process.store.logs, self._world.scenario.log_capacity
        held = [old for old in logs if old != step and (old - step) % capacity == 0]
        what = f"{process} begins step {step} and has the logs of {sorted(logs)}"
        require(not held, "3 memory", what, "with room for", capacity)

    def landed(self, committing: Process) -> None:
        """Checks, when one rank commits a step in training, every rank's log of that step."""
        step = committing.state.step
        for process in self._world.live:
            if process.rank is not None and process.number not in self.damaged:
                wanted = self._sends(process)
                there = self._logged(process, step, self._world.clock.now)
                what = f"{committing} commits step {step} while {process} has logged {there}"
                require(there == wanted, "3 logs", what, "of", wanted, "tensors")

    def reach_back(self, process: Process, persisted: Window | None) -> None:
        """Checks that a rank in training has the logs that a replay from a window needs."""
        if process.number in self.damaged:
            return
        first = process.timetable.first_step if persisted is None else persisted.start
        first = max(first, self.copied.get(process.number, 0))
        wanted = self._sends(process)
        for step in range(first + 1, process.state.step + 1):
            there = self._logged(process, step, math.inf)
            what = (process, "has", there, "of", wanted, "tensors of step", step, "in its log")
            require(there == wanted, "3 logs", *what, "needed for", persisted)

    def _sends(self, process: Process) -> int:
        """Returns how many tensors a rank sends in a step."""
        shape = self._world.shape
        stage = process.place.pp
        return sum(shape.sends(stage, direction) for direction in shape.receivers[stage])

    def _logged(self, process: Process, step: int, now: float) -> int:
        """Returns how many tensors of a step had landed in a log by some time."""
        tensors = process.store.logs.get(step, {})
        return sum(logged.landed_at <= now for logged in tensors.values())
