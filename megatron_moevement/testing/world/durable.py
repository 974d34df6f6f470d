"""Durable checkpoints of a simulated job: whole or not there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.reference import initial_state

if TYPE_CHECKING:
    from megatron_moevement.testing.world.process import Process
    from megatron_moevement.testing.world.world import World


@dataclasses.dataclass(frozen=True)
class SavedRank:
    """A rank's part of a durable checkpoint: its state and the loss of every step so far."""

    live: Live
    losses: dict[int, int]


class Checkpoints:
    """Storage that survives everything."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._saved: dict[int, dict[LogicalRank, SavedRank]] = {
            0: {
                rank: SavedRank(initial_state(world.history, world.shape, rank), {})
                for rank in world.shape.layout.ranks
            }
        }

    def save(self, process: Process) -> None:
        """Saves a rank's part; the checkpoint counts once every rank has saved its own."""
        parts = self._saved.setdefault(process.state.step, {})
        parts[process.place] = SavedRank(process.state.copy(), dict(process.store.losses))

    @property
    def whole(self) -> Durable:
        """What could be loaded now."""
        ranks = len(self._world.shape.layout.ranks)
        saved = max(step for step, parts in self._saved.items() if len(parts) == ranks)
        return Durable(saved if self._world.scenario.loads else 0, saved)

    def begin_history(self, step: int) -> None:
        """Notes that a history begins: what an earlier one saved beyond it is not its own."""
        self._saved = {saved: parts for saved, parts in self._saved.items() if saved <= step}

    def load(self, step: int, rank: LogicalRank) -> SavedRank:
        """Returns a rank's part of a checkpoint."""
        saved = self._saved[step][rank]
        return SavedRank(saved.live.copy(), dict(saved.losses))
