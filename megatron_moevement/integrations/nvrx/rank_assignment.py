# SPDX-License-Identifier: Apache-2.0
"""Places: survivors of a fault keep theirs, spares take those of the lost processes."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nvidia_resiliency_ext.inprocess.attribution import Interruption as Reason
from nvidia_resiliency_ext.inprocess.rank_assignment import Layer, LayerFlag, Tree

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.nvrx.reasons import ENDED, REASONS, UNKNOWN
from megatron_moevement.runtime.coordination.generation import Interruption, Loss
from megatron_moevement.settings.restart import Granularity

logger = logging.getLogger(__name__)


class AllDoneError(MoEvementError):
    """A generation that ended by an interrupt was complete: there is nothing to restart."""


class StickyRankAssignment(Tree):  # type: ignore[misc]  # upstream is not typed
    """Assigns places; where a whole failure domain is given up, its size is what it starts with."""

    def __init__(
        self,
        active_ranks: int,
        granularity: Granularity,
        domain: str,
        interruption: Interruption,
        processes: Sequence[int],
        *,
        ends: Callable[[Collection[int]], Mapping[int, str]],
    ) -> None:
        """Makes the layers of upstream's tree.

        Args:
            active_ranks: places of the job.
            interruption: gets the processes whose loss ended a generation.
            processes: that take part, in the order in which NVRx counts them.
            ends: returns how processes ended of which it is known that they have.
        """
        self._interruption = interruption
        self._processes = processes
        self._ends = ends
        self._hosts: dict[int, str] = {}
        # With too few processes left the job stops as a whole: the limit of retries sees to it.
        layers = [
            Layer(min_ranks=1, max_ranks=active_ranks, key_or_fn="job", flag=LayerFlag.RESERVE)
        ]
        if granularity is Granularity.NODE:
            layers.append(Layer(key_or_fn=domain, flag=LayerFlag.RESERVE))
        self._active_ranks = active_ranks
        super().__init__(layers)

    def build_tree(self, state: Any, store: Any) -> None:
        """Builds the tree from what all processes say, once, at the start."""
        store.send_host(socket.gethostname(), state.rank)
        super().build_tree(state, store)
        self._hosts = dict(enumerate(store.get_hosts(range(state.world_size))))
        domains = {} if len(self.layers) == 1 else self.tree.children
        if state.rank == 0:
            warning = lacking_spares(
                {name: len(domain.children) for name, domain in domains.items()},
                self._active_ranks,
            )
            if warning is not None:
                logger.warning("%s", warning)
        for domain in domains.values():
            size = len(domain.children)
            domain.layer = dataclasses.replace(domain.layer, min_ranks=size, max_ranks=size)

    def __call__(self, ctx: Any) -> Any:
        """Assigns the places of a generation, and notes why the one before it ended.

        Raises:
            AllDoneError: all processes had done their work when one was lost, which interrupts
                those that are slow to leave.
        """
        if self.tree is not None:
            if ctx.store.is_done():
                raise AllDoneError("all processes have done their work")
            self._interruption.losses = self._losses(ctx)
        return super().__call__(ctx)

    def _losses(self, ctx: Any) -> tuple[Loss, ...]:
        """Returns the processes that are lost; where none is, those that ended the generation."""
        reasons = {rank: Reason[name] for rank, name in ctx.store.get_reasons().items()}
        named = sorted(ctx.terminated_ranks or reasons.keys())
        numbers = {rank: int(self.rank_map[rank].state.initial_rank) for rank in named}
        ended = [
            self._processes[numbers[rank]]
            for rank in ctx.terminated_ranks
            if reasons.get(rank, Reason.TERMINATED) in ENDED
        ]
        ends = self._ends(ended) if ended else {}
        found = []
        for rank in named:
            state, number = self.rank_map[rank].state, numbers[rank]
            reason = reasons.get(rank)
            found.append(
                Loss(
                    self._processes[number],
                    None if state.active_rank is None else int(state.active_rank),
                    self._hosts.get(number, "an unknown machine"),
                    UNKNOWN if reason is None else REASONS[reason],
                    ends.get(self._processes[number]),
                )
            )
        return tuple(found)


def lacking_spares(sizes: Mapping[str, int], active_ranks: int) -> str | None:
    """Returns what to say where spares are too few to replace each failure domain.

    Args:
        sizes: processes of each failure domain, where one is given up as a whole.
        active_ranks: places of the job.
    """
    spares = sum(sizes.values()) - active_ranks
    if not sizes or spares < 0 or spares >= max(sizes.values()):
        return None
    largest = max(sizes, key=lambda name: sizes[name])
    return (
        "--inprocess-granularity node gives up a whole failure domain with a process, and "
        f"{spares} spares can't replace {largest} with its {sizes[largest]} processes: the job "
        f"would stop; start {sizes[largest]} spares"
        + (", or give --inprocess-granularity rank" if spares else "")
    )
