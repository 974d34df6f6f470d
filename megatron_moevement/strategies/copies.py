"""Copies: this rank's slots on their way to the processes that keep them too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from operator import methodcaller

from megatron_moevement.policy.persistence import Acknowledgements
from megatron_moevement.policy.placement import Host, Placement, replace_holder
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.schedule import Window
from megatron_moevement.runtime.fault_points import NO_FAULTS, FaultPoints
from megatron_moevement.runtime.replication.sender import SlotSender
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.settings.faults import Place

logger = logging.getLogger(__name__)

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
        placement: Placement,
        hosts: Sequence[Host],
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        """Takes over the sender; closes it at the end.

        Args:
            sender: the connections.
            ring: this rank's slots.
            placement: who is to keep copies for whom.
            hosts: all processes that may.
            faults: where this process fails on purpose.
        """
        self._sender = sender
        self._ring = ring
        self._placement = placement
        self._began_with = placement.holders[ring.owner]
        self._hosts = tuple(hosts)
        self._faults = faults
        self._lock = threading.Lock()  # who keeps copies, and the sender's connections
        self.sent_bytes = 0

    @property
    def acknowledgements(self) -> Acknowledgements:
        """What is known of the copies."""
        return self._sender.acknowledgements

    @property
    def holders(self) -> tuple[int, ...]:
        """The processes that are to keep copies."""
        return self._placement.holders[self._ring.owner]

    def land(self, record: SlotRecord) -> None:
        """Sends off a slot that has landed in the ring."""
        with self._lock:
            self._land_for(record, self.holders)

    def land_for(self, record: SlotRecord, lacking: Sequence[int]) -> None:
        """Sends a slot to holders that lack it; it is complete when they have it.

        Args:
            record: of a slot in the ring.
            lacking: of the holders at the beginning; those that came later lack it, too.
        """
        with self._lock:
            added = set(self.holders) - set(self._began_with)
            self._land_for(record, [each for each in self.holders if each in {*lacking, *added}])

    def await_change(self) -> None:
        """Waits a while for an acknowledgement, and replaces who is silent.

        Where nobody can take its place the slots have a copy less, but training goes on.
        """
        self._sender.await_change(_PATIENCE)
        with self._lock:
            for process in self._sender.silent:
                self._replace(process)

    def _land_for(self, record: SlotRecord, to: Sequence[int]) -> None:
        self._sender.land(self._ring.owner, record, self._ring.payload(record), to)
        self.sent_bytes += record.payload_bytes * len(to)

    def _replace(self, silent: int) -> None:
        """Gives a holder's copies to another process, those of it that were complete included."""
        successor = self._successor_of(silent)
        known = self.acknowledgements.owing
        kept = known if successor is not None else ()
        self._sender.update(methodcaller("holder_replaced", silent, successor, kept))
        if successor is None:
            return
        for key in known:
            record = self._ring.record(key.step)
            assert record is not None  # the ring keeps a slot for as long as it is accounted for
            self._sender.send(key.owner, record, self._ring.payload(record), (successor,))
            self.sent_bytes += record.payload_bytes

    def _successor_of(self, silent: int) -> int | None:
        """Returns who keeps copies from now on instead of a process; None where nobody does."""
        former = self.holders
        if silent not in former:
            return None
        hosts = [host for host in self._hosts if host.process not in self._sender.silent]
        self._placement = replace_holder(self._placement, hosts, self._ring.owner, silent)
        successor = next((each for each in self.holders if each not in former), None)
        by = "nobody" if successor is None else f"process {successor}"
        logger.warning(
            "%s keeps the copies of %s instead of process %d", by, self._ring.owner, silent
        )
        return successor

    def await_second_holder(self, window: Window) -> None:
        """Waits until every slot of a window has a copy; the others may be on their way."""
        while not self.acknowledgements.has_second_holder(window, self.holders):
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
