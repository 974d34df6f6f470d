"""Copies: this rank's slots on their way to the processes that keep them too."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import methodcaller

from megatron_moevement.policy.persistence import Acknowledgements
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.schedule import Window
from megatron_moevement.runtime.fault_points import NO_FAULTS, FaultPoints
from megatron_moevement.runtime.replication.sender import SlotSender
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.settings.faults import Place

_PATIENCE = timedelta(seconds=1)
"""Between two looks at who is silent."""


class Copies:
    """The copies of one rank's slots.

    The capture's thread sends them off; the training thread does the rest.
    """

    def __init__(
        self,
        sender: SlotSender,
        ring: RingFile,
        holders: Sequence[int],
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        """Takes over the sender; closes it at the end.

        Args:
            sender: the connections.
            ring: this rank's slots.
            holders: the processes that are to keep copies.
            faults: where this process fails on purpose.
        """
        self._sender = sender
        self._ring = ring
        self._holders = tuple(holders)
        self._faults = faults
        self.sent_bytes = 0

    @property
    def acknowledgements(self) -> Acknowledgements:
        """What is known of the copies."""
        return self._sender.acknowledgements

    def land(self, record: SlotRecord) -> None:
        """Sends off a slot that has landed in the ring."""
        self.land_for(record, self._holders)

    def land_for(self, record: SlotRecord, lacking: Sequence[int]) -> None:
        """Sends a slot to processes that lack it; it is complete when they have it."""
        self._sender.land(self._ring.owner, record, self._ring.payload(record), lacking)
        self.sent_bytes += record.payload_bytes * len(lacking)

    def await_change(self) -> None:
        """Waits a while for an acknowledgement, and gives up who is silent.

        A silent process keeps nothing from now on: the slots have a copy less, but training goes
        on.
        """
        self._sender.await_change(_PATIENCE)
        silent = set(self._sender.silent).intersection(self._holders)
        self._holders = tuple(each for each in self._holders if each not in silent)
        for process in silent:
            self._sender.update(methodcaller("holder_replaced", process, None, ()))

    def await_complete(self, window: Window) -> None:
        """Waits until every slot of a window has all its copies."""
        while not self.acknowledgements.is_complete(window):
            self.await_change()

    def drop_before(self, window: Window) -> None:
        """Forgets the slots of older windows."""
        self._sender.update(lambda known: known.dropped_before(window))

    def fetch(
        self, process: int, window: Window, slot: int, owner: LogicalRank | None = None
    ) -> None:
        """Fetches a slot of this rank from a process into the ring.

        Args:
            process: who has it.
            window: which window.
            slot: its place in the window.
            owner: a replica whose slot, of the same bits, becomes this rank's; None: its own.

        Raises:
            FetchError: the process does not give it intact and in time.
        """
        step = window.step_of(slot)
        self._ring.invalidate(step)
        record = self._sender.fetch(
            process, owner or self._ring.owner, window, slot, self._ring.buffer(step)
        )
        self._faults.strike(step, Place.FETCH)
        self._ring.publish(record)

    def close(self) -> None:
        """Ends the connections; copies on their way are given up."""
        self._sender.close()
