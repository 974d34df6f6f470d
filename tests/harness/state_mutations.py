# SPDX-License-Identifier: Apache-2.0
"""Mutations of the state that a replay leads to, behind all checksums of what it loads.

None of them shows in what a replay sends: the proof of the state has to find them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.integrations.megatron.optimizer import GradientStatistics, SplitOptimizer
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.runtime.slots.slot_record import EXTRAS, SlotPart
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.strategies.moevement.recovery.replay import Replay, Slots
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing

FLIPPED_STEP = 4
FLIPPED_RANK = 1


def scale_last_moments() -> None:
    """Scales first moments of an operator of the window's last slot, once it is loaded."""
    put_back = Slots.put_back

    @torch.no_grad()
    def scaled(self: Slots, slot: int, live: LiveOperators) -> frozenset[OperatorId]:
        full = put_back(self, slot, live)
        if slot == self.window.size - 1 and full:
            for piece in live.pieces(min(full), Content.FULL):
                if piece.name.endswith("exp_avg"):
                    piece.live.mul_(1.5)
        return full

    _replace(Slots, "put_back", scaled)


def update_wrongly_at_last() -> None:
    """Moves a master weight too far in the last replayed step."""
    statistics, commit = Replay.statistics, SplitOptimizer.commit
    last: list[int] = []

    def note(self: Replay, step: int) -> GradientStatistics | None:
        if step == self.target:
            last.append(step)
        return statistics(self, step)

    @torch.no_grad()
    def move(self: SplitOptimizer, given: GradientStatistics, *args: Any) -> bool:
        done = commit(self, given, *args)
        if last:
            last.clear()
            part = next(part for part in self.parts if not part.is_stub_optimizer)
            part.optimizer.param_groups[0]["params"][0].mul_(1.001)
        return done

    _replace(Replay, "statistics", note)
    _replace(SplitOptimizer, "commit", move)


def fetch_bad_copy() -> None:
    """Makes what is fetched in the first recovery bad, behind checksums that fit."""
    fetch = SlotReplicator.fetch

    def spoiled(self: SlotReplicator, process: int, key: SlotKey, needed: Container[int]) -> None:
        fetch(self, process, key, needed)
        if self._sender._me.generation > 1:  # noqa: SLF001  (it has no name outside)
            return
        ring = self.ring
        record = ring.record(key.step)
        assert record is not None
        payload = ring.payload(record)
        parts = []
        for part in record.parts:
            if part.name != EXTRAS and part.size_bytes > 16:
                payload[part.offset + 9] ^= 1
            own = payload[part.offset : part.offset + part.size_bytes]
            parts.append(SlotPart.of(part.name, part.offset, own))
        ring.publish(dataclasses.replace(record, parts=tuple(parts)))

    _replace(SlotReplicator, "fetch", spoiled)


def flip_replica() -> None:
    """Scales second moments of an operator that is FULL in the slot of step 4, on one replica."""
    commit = SparseCheckpointing.commit

    @torch.no_grad()
    def flipped(self: SparseCheckpointing, entry: Any, progress: Any, covered: Any) -> None:
        if progress.committed == FLIPPED_STEP and dist.get_rank() == FLIPPED_RANK:
            timetable = self._history.timetable
            schedule = self._history.schedule_of(timetable.window_of(FLIPPED_STEP))
            full = schedule.full[timetable.slot_of(FLIPPED_STEP)]
            for piece in self._session.live.pieces(min(full), Content.FULL):
                if piece.name.endswith("exp_avg_sq"):
                    piece.live.mul_(2)
        commit(self, entry, progress, covered)

    _replace(SparseCheckpointing, "commit", flipped)


STATE_MUTATIONS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (scale_last_moments, update_wrongly_at_last, fetch_bad_copy, flip_replica)
}
"""By name."""


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: a mutation of nothing shows nothing"
    setattr(owner, name, function)
