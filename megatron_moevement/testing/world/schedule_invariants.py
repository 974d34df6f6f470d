# SPDX-License-Identifier: Apache-2.0
"""Invariants of what schedules are chosen by: all ranks' counts, and the worst rank's link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.preflight.forecast import Cluster
from megatron_moevement.policy.watching.measurements import Measured, Reduced
from megatron_moevement.policy.watching.schedule_maker import Noted
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.testing.world.live import SlotContent
from megatron_moevement.testing.world.process import Process, Run
from megatron_moevement.testing.world.violations import require

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


class ScheduleInvariants:
    """Compares what ranks go by with what all of them have counted and measured."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[tuple[int, int], Popularity] = {}
        self._told: dict[tuple[int, int], list[Measured]] = {}
        self._foreseen: Mapping[LogicalRank, tuple[int, ...]] | None = None

    def counted(self, process: Process, run: Run) -> None:
        """Checks what a rank has learnt of the experts with a step of its training."""
        if run.plan is not None or run.entry is None or run.entry.popularity is None:
            return
        known = run.entry.popularity
        one = self._known.setdefault((process.generation, run.step), known)
        require(known == one, "2b same counts", process, "knows", known, "and another rank", one)

    def reduced(self, former: Popularity, known: Popularity, steps: range) -> None:
        """Checks tokens that were added up over a window: they are all ranks', or passed over."""
        if known.ordering is not Ordering.HARD or known.scores == former.scores:
            return
        counts = self._world.tokens.of_all(self._world.shape.layout.ranks, steps)
        require(known.scores == counts, "2b same counts", known.scores, "of", counts, "are known")

    def told(self, step: int, votes: Iterable[Sequence[int]]) -> None:
        """Notes what ranks have measured until the barrier of a step; votes end with it."""
        each = (Measured.worst(Reduced(*vote[-len(Reduced._fields) :])) for vote in votes)
        measured = [own for own in each if own is not None]
        self._told[self._world.restarts.generation, step] = measured

    def chooses(self, process: Process, news: Noted) -> None:
        """Checks that W is chosen by what is no better than what any rank has measured."""
        found = news.measured
        for own in self._told[process.generation, news.step]:
            is_worst = (
                _is_most(own.to_host_bytes_per_s, found.to_host_bytes_per_s)
                and _is_most(own.to_holder_bytes_per_s, found.to_holder_bytes_per_s)
                and own.iteration_s >= found.iteration_s
                and own.stall_s <= found.stall_s
                and own.contention_s <= found.contention_s
                and (own.delay_s or 0.0) <= (found.delay_s or 0.0)
            )
            require(is_worst, "2b worst rank", process, "goes by", found, "a rank has", own)

    def has_room(self, process: Process, key: SlotKey, content: SlotContent) -> None:
        """Checks that a slot is no larger than the memory that was made for it at the start."""
        size, room = self._world.link_times.slot_bytes(content), self._world.proposals.room
        there = room(process.place).slot_bytes
        require(size <= there, "3 memory", process, "captures", size, "bytes for", key, "in", there)

    def placed(self, owner: Process) -> None:
        """Checks, at the start of the job, that memory was foreseen with who keeps the copies."""
        if self._world.restarts.generation > 1:
            return
        if self._foreseen is None:
            self._foreseen = self._foresee()
        foreseen = self._foreseen[owner.place]
        what = (owner, "has copies at", owner.holders, "foreseen were", foreseen)
        require(foreseen == owner.holders, "3 memory", *what)

    def _foresee(self) -> Mapping[LogicalRank, tuple[int, ...]]:
        """Returns who keeps whose copies, as it is said before a job starts."""
        world, scenario = self._world, self._world.scenario
        ranks, per_node = world.shape.layout.ranks, scenario.processes_per_domain
        processes = len(ranks) + scenario.spares
        nodes = -(-processes // per_node)
        cluster = Cluster(nodes, per_node, nodes * per_node - len(ranks))
        members = [Host(n, cluster.domain_of(n), rank) for n, rank in enumerate(ranks)]
        waiting = world.policies.waiting(cluster, len(ranks))[: scenario.spares]
        hosts = [*members, *waiting]
        return world.policies.place_replicas(hosts, scenario.replicas).holders


def _is_most(own: float | None, found: float | None) -> bool:
    return own is None or (found is not None and own >= found)
