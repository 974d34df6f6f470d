"""Own slots in a recovery: what this rank's ring lacks is fetched, what holders lack is sent."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Plan, SlotFetch, WindowEdges
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.sender import FetchError
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.strategies.moevement.protection.host_memory import JobMemory

logger = logging.getLogger(__name__)


class OwnSlots:
    """The slots of one rank, as the facts of a recovery tell where they are."""

    def __init__(self, memory: JobMemory, facts: Facts, rank: LogicalRank, plan: Plan) -> None:
        """Reads the facts.

        Args:
            memory: this process's; it is open.
            facts: of all processes, of the newest history.
            rank: the rank that this process occupies.
            plan: what is carried out.
        """
        self._memory = memory
        self._holders = memory.plan.placement.holders[rank]
        self._held: dict[Window, dict[int, int]] = defaultdict(dict)
        for process in facts.processes:
            for holding in process.holdings:
                if plan.edges is WindowEdges.KEPT and holding.owner == rank:
                    self._held[holding.window][process.process] = holding.slots
        self._persisted = plan.persisted
        self._own = memory.host.process

    def fetch(self, fetches: Sequence[SlotFetch]) -> None:
        """Gets slots into the ring.

        A process that was a spare may have one in the ring of copies that it kept for the rank.
        """
        for fetch in fetches:
            key = fetch.slot
            if fetch.source != self._own or self._record(key.window, key.slot) is None:
                self._fetch(fetch)

    def ring(self, target: int) -> SlotRing:
        """Returns what the ring holds, for a rank whose state is S_target.

        A slot that this process has in a ring of copies alone is not among them: nobody sends that.
        """
        steps = [
            window.step_of(slot)
            for window, held in self._kept_windows()
            for slot in range(window.size)
            if held.get(self._own, 0) >> slot & 1 and self._record(window, slot) is not None
        ]
        is_captured = target in steps
        oldest = min(steps, default=target) if self._persisted is None else self._persisted.start
        return SlotRing(self._memory.own_ring.capacity, oldest, target + is_captured)

    def share(self, windows: Sequence[Window], last: int) -> None:
        """Sends what holders lack of some windows, up to a step, in the background."""
        for window in windows:
            held = self._held.get(window, {})
            for slot in range(window.size):
                record = self._record(window, slot)
                if record is not None and record.step <= last:
                    lacking = [one for one in self._holders if not held.get(one, 0) >> slot & 1]
                    self._memory.copies.land_for(record, lacking)

    def shareable(self) -> list[Window]:
        """Returns the windows from the persisted one on; that one only where it is whole here."""
        found = []
        for window, held in self._kept_windows():
            if held.get(self._own, 0) and (window != self._persisted or self.is_whole(window)):
                found.append(window)
        return found

    def is_whole(self, window: Window) -> bool:
        """Returns whether the ring holds every slot of a window."""
        return all(self._record(window, slot) is not None for slot in range(window.size))

    def _kept_windows(self) -> list[tuple[Window, dict[int, int]]]:
        oldest = self._persisted
        return [
            (window, held)
            for window, held in sorted(self._held.items())
            if oldest is None or window >= oldest
        ]

    def _fetch(self, fetch: SlotFetch) -> None:
        """Gets a slot from the first of its sources that gives it whole."""
        key = fetch.slot
        for source in fetch.sources:
            try:
                self._memory.copies.fetch(source, key)
                break
            except FetchError as error:
                if source == fetch.sources[-1]:
                    raise
                logger.warning("%s; another process has it, too", error)
        held = self._held[key.window]
        held[self._own] = held.get(self._own, 0) | 1 << key.slot

    def _record(self, window: Window, slot: int) -> SlotRecord | None:
        """Returns what the ring says of a slot, None when it holds another one."""
        record = self._memory.own_ring.record(window.step_of(slot))
        if record is None or (record.window, record.slot) != (window, slot):
            return None
        return record
