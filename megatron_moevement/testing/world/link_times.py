# SPDX-License-Identifier: Apache-2.0
"""Link times: how long a slot takes to its holders, by its bytes, in a world that measures that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_moevement.policy.watching.measurements import Work
from megatron_moevement.testing.world.live import SlotContent
from megatron_moevement.testing.world.meter import UNIT_S
from megatron_moevement.testing.world.process import Process

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

_CAPTURES_PER_ITERATION = 5
"""Of the state of the largest rank, to the host."""
_LATENCY = 0.02
_PASS_TIME = 2.6
"""Of a micro-batch through a stage, forward and back, with its way to the next."""


class LinkTimes:
    """One after the other takes its turn on the link from one process to another."""

    def __init__(self, world: World) -> None:
        self._world = world
        scenario, inventory = world.scenario, world.shape.schedule.inventory
        layout = scenario.layout
        passes = layout.chunks * (scenario.micro_batches + layout.pp - 1)
        self._state_bytes = max(
            sum(one.full_bytes for one in operators) for operators in inventory.by_rank.values()
        )
        self._iteration = _PASS_TIME * passes + 1
        self._sizes = {
            one.id: (one.full_bytes, one.compute_bytes)
            for operators in inventory.by_rank.values()
            for one in operators
        }
        self._places = {rank: place for place, rank in enumerate(layout.ranks)}
        self._free_at: dict[tuple[int, int, int], float] = {}

    def slot_bytes(self, content: SlotContent) -> int:
        """Returns how large a slot is."""
        full = sum(self._sizes[operator][0] for operator in content.full)
        return full + sum(self._sizes[operator][1] for operator in content.compute)

    def capture(self, content: SlotContent) -> Work:
        """Returns the work of copying a slot to the host."""
        size = self.slot_bytes(content)
        spent = self._iteration * size / (_CAPTURES_PER_ITERATION * self._state_bytes)
        return Work(size, (spent + _LATENCY) * UNIT_S)

    def burden(self, captured: Work) -> float:
        """Returns how long a core works beside a step for a slot that was captured."""
        share = self._world.scenario.conditions.burden_percent / 100
        return self._iteration * share * captured.size_bytes / self._state_bytes

    def transfer(self, source: Process, target: int, content: SlotContent) -> tuple[float, Work]:
        """Returns when a copy's turn on the link comes, and the work of sending it from then on."""
        now, size = self._world.clock.now, self.slot_bytes(content)
        link = (source.number, target, source.generation)
        share = self._percent(source) / 100
        spent = self._iteration * size / (share * self._state_bytes) + _LATENCY
        begun = max(now, self._free_at.get(link, 0.0))
        self._free_at[link] = begun + spent
        return begun, Work(size, spent * UNIT_S)

    def _percent(self, source: Process) -> int:
        step, ranks = source.store.committed or 0, len(self._places)
        place = self._places[source.place]
        speeds = [
            speed.percent
            for speed in self._world.scenario.conditions.speeds
            if speed.step <= step and (speed.rank < 0 or speed.rank % ranks == place)
        ]
        return speeds[-1]
