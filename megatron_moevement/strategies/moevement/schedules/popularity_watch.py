# SPDX-License-Identifier: Apache-2.0
"""Popularity of experts in a job: reduced at window edges, kept in the ledger, known to all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_moevement.integrations.megatron.router_counts import RouterCounts
from megatron_moevement.policy.window.popularity import Popularity, steps_to_reduce
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.runtime.coordination.agreement import broadcast_json
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.interrupts.host_wait import await_on_host
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.strategies.scalars import decode_entry


class PopularityWatch:
    """What one rank knows of its job's experts in one generation; its training thread uses it.

    The first step of a window reduces what was counted in the window before it, unless W = 1, and
    the entry of that step has what is known then. So it is known wherever the ledger is, and a
    replay takes it from there.
    """

    def __init__(self, counts: RouterCounts, decay: float, events: Events) -> None:
        """Knows nothing before `recall`.

        Args:
            decay: of a moving average.
            events: are told of each window.
        """
        self._counts = counts
        self._decay = decay
        self._events = events
        self.known = Popularity(counts.ordering)
        """The newest; it is replaced as a whole."""

    def recall(self, journal: Journal, device: torch.device, rolled: Iterable[int]) -> None:
        """Takes the newest that the ledger of any rank has; every rank calls it.

        Args:
            rolled: steps that were not committed here but applied after a fault; they are reported.
        """
        if not self._counts.is_counting:
            return
        for step in rolled:
            self.committed(decode_entry(journal.entry(step)))
        step, self.known = self._newest_in(journal)
        place = step * dist.get_world_size() + dist.get_rank()
        newest = torch.tensor([place, -step], device=device)
        await_on_host(dist.all_reduce(newest, op=dist.ReduceOp.MAX, async_op=True))
        place, oldest = newest.tolist()
        step, source = divmod(place, dist.get_world_size())
        if step != -oldest:
            told = broadcast_json(self.known.document(), source, device)
            self.known = Popularity.of_document(told)

    def _newest_in(self, journal: Journal) -> tuple[int, Popularity]:
        """Returns the newest that a journal has, and its step; 0 where it has none."""
        for step in reversed(journal.entries()):
            found = decode_entry(journal.entry(step)).popularity
            if found is not None:
                return step, self._of_this_kind(found)
        return 0, Popularity(self._counts.ordering)

    def _of_this_kind(self, found: Popularity) -> Popularity:
        """Returns what is known, unless a former launch has counted something else."""
        ordering = self._counts.ordering
        return found if found.ordering is ordering else Popularity(ordering)

    def at_barrier(self, step: int, timetable: Timetable) -> Popularity | None:
        """Returns what the entry of a step is to have: something in the first step of a window.

        Every rank calls it for a step that is done for the first time.
        """
        if not self._counts.is_counting:
            return None
        steps = steps_to_reduce(timetable, step)
        if not steps:
            return None if steps is None else self.known
        return self.known.after_window(self._counts.reduced(steps), self._decay)

    def committed(self, entry: LedgerEntry) -> None:
        """Takes note of what the entry of a step has, and reports it."""
        if entry.popularity is None:
            return
        self.known = known = self._of_this_kind(entry.popularity)
        asks_for_order = bool(known.scores) and known.ordered_by == known.scores
        is_listed = asks_for_order and dist.get_rank() == 0  # there may be thousands
        listed = {"experts": self._counts.num_experts, "scores": known.scores}
        self._events.emit(
            EventName.POPULARITY,
            entry.step,
            ordering=known.ordering.value,
            total=sum(known.scores),
            digest=hashlib.sha256(repr(known.scores).encode()).hexdigest(),
            asks_for_order=asks_for_order,
            **(listed if is_listed else {}),
        )
