# SPDX-License-Identifier: Apache-2.0
"""Copies: this rank's slots on their way to the processes that keep them too."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import methodcaller

from megatron_moevement.policy.copies.peer_trouble import Remedy, Trouble, successor_of
from megatron_moevement.policy.copies.persistence import Acknowledgements, SlotKey
from megatron_moevement.policy.copies.placement import Host, Placement, lacking_holders
from megatron_moevement.policy.copies.slot_ring import RingFullError
from megatron_moevement.policy.watching.measurements import Work
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.faults.fault_points import NO_FAULTS, FaultPoints
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.handshake import RefusedError
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.strategy import CaptureLostError

logger = logging.getLogger(__name__)

_PATIENCE = timedelta(seconds=0.25)
"""Between two looks at who is silent."""


class SlotReplicator:
    """The copies of one rank's slots.

    The capture's thread sends them off; the training thread does the rest.
    """

    def __init__(  # noqa: PLR0917  (what copies are made of)
        self,
        sender: SlotSender,
        ring: RingFile,
        placement: Placement,
        hosts: Sequence[Host],
        faults: FaultPoints = NO_FAULTS,
        uninterrupted: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        ping: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes over the sender; closes it at the end.

        Args:
            hosts: all processes that may.
            uninterrupted: encloses what a restart waits for.
            ping: restarts the progress watchdog.
        """
        self._sender = sender
        self.ring = ring
        """This rank's slots."""
        self._placement = placement
        self._began_with = placement.holders[ring.owner]
        self._hosts = tuple(hosts)
        self._faults = faults
        self._uninterrupted = uninterrupted
        self._ping = ping
        self._lock = threading.Lock()  # who keeps copies, and the sender's connections
        self.sent_bytes = 0
        self.moved = 0
        """Copies of slots that were there already, sent to holders that lacked them or fetched."""

    @property
    def acknowledgements(self) -> Acknowledgements:
        """What is known of the copies."""
        return self._sender.account.acknowledgements

    @property
    def holders(self) -> tuple[int, ...]:
        """The processes that are to keep copies."""
        return self._placement.holders[self.ring.owner]

    @property
    def is_in_trouble(self) -> bool:
        """Whether transfers to a process fail."""
        return bool(self._sender.account.troubles)

    @property
    def sent(self) -> Mapping[int, Sequence[Work]]:
        """For each holder the newest copies that it has acknowledged."""
        return {process: self._sender.account.sent_to(process) for process in self.holders}

    @property
    def spent_s(self) -> Mapping[int, float]:
        """For each process the time that its copies took until now."""
        return self._sender.account.spent_s

    def land(self, record: SlotRecord) -> None:
        """Sends off a slot that has landed in the ring."""
        with self._lock:
            self._land_for(record, self.holders)

    def land_for(self, slots: Iterable[tuple[SlotRecord, Sequence[int]]]) -> None:
        """Sends slots to holders that lack them; each is complete when they have it.

        Args:
            slots: those in the ring that are accounted for from now on, each with those that lack
                it of the holders at the beginning; those that came later lack it, too.
        """
        with self._lock:
            sends = [
                (record, lacking_holders(lacking, self._began_with, self.holders))
                for record, lacking in slots
            ]
            # All of them before the first is sent: a holder keeps what is accounted for.
            for record, to in sends:
                self._sender.landed(self.ring.owner, record, to, self._having(to))
            for record, to in sends:
                self._land_for(record, to)
                self.moved += len(to)

    def await_change(self) -> None:
        """Waits a while for an acknowledgement, and mends what has failed.

        Raises:
            CaptureLostError: a slot is damaged in the ring.
        """
        self._sender.account.await_change(_PATIENCE)
        self.mend()

    def await_until(self, is_met: Callable[[], bool]) -> None:
        """Waits for acknowledgements.

        The progress watchdog limits how long none arrives, in the first step of a generation too.

        Args:
            is_met: returns whether those that have arrived are enough.

        Raises:
            CaptureLostError: a slot is damaged in the ring.
        """
        owed = None
        while not is_met():
            if owed != (owed := self.acknowledgements.owed_copies()):
                self._ping()
            self.await_change()

    def mend(self) -> None:
        """Sends again to holders to which a transfer has failed, or lets others take their place.

        Where nobody can, slots with another copy are complete without; a slot without any is not,
        for as long as there is a holder that may come back.

        Raises:
            CaptureLostError: a slot is damaged in the ring.
        """
        for key in self.acknowledgements.lost_of(self._sender.account.damaged):
            self.ring.is_doubted = True
            raise CaptureLostError(
                f"slot {key.slot} of {key.owner}, of step {key.step}, is damaged in the memory of "
                "its own process, and not all of its copies were made: check the machine's memory"
            )
        if not self._sender.account.silent:
            return
        with self._lock:
            for process in self._sender.account.silent:
                if process in self.holders:
                    with self._uninterrupted():
                        self._mend(process)

    def _mend(self, silent: int) -> None:
        trouble = self._sender.account.troubles[silent]
        if trouble.is_lasting:
            if self._replace(silent):
                return
            self._excuse(silent, trouble)
        if trouble.remedy(time.monotonic()) is Remedy.TRY_AGAIN:
            self._sender.try_again(silent)
            owing = self.acknowledgements.owing
            self._send([key for key in owing if silent in owing[key]], silent)

    def _excuse(self, silent: int, trouble: Trouble) -> None:
        if silent in self.acknowledgements.excused:
            return
        self._sender.account.update(methodcaller("holder_excused", silent))
        logger.warning(
            "process %d keeps no copies of %s now (%s), and no process can replace it: it is tried "
            "again until it does; where there is no other copy, training waits",
            silent,
            self.ring.owner,
            trouble.reason,
        )

    def _land_for(self, record: SlotRecord, to: Sequence[int]) -> None:
        payload, have = self.ring.payload(record), self._having(to)
        self._sender.land(self.ring.owner, record, payload, to, have)
        self.sent_bytes += record.payload_bytes * len(to)

    def _having(self, lacking: Sequence[int]) -> set[int]:
        return set(self.holders).difference(lacking)

    def _replace(self, silent: int) -> bool:
        """Gives a holder's copies to another process, those of it that were complete included.

        Returns:
            Whether there is one.
        """
        successor, self._placement = successor_of(
            self._placement,
            self._hosts,
            self.ring.owner,
            silent,
            troubles=self._sender.account.troubles,
            now_s=time.monotonic(),
        )
        if successor is None:
            return False
        known = tuple(self.acknowledgements.owing)
        self._sender.account.update(methodcaller("holder_replaced", silent, successor, known))
        if successor in self._sender.account.silent:  # it failed long ago
            self._sender.try_again(successor)
        self._send(known, successor)
        logger.warning(
            "process %d keeps the copies of %s instead of process %d",
            successor,
            self.ring.owner,
            silent,
        )
        return True

    def _send(self, slots: Iterable[SlotKey], to: int) -> None:
        """Sends slots of the ring to a holder, in the order of their capture."""
        for key in sorted(slots, key=lambda key: key.step):
            record = self.ring.held(key.step)  # for as long as it is accounted for
            self._sender.send(key.owner, record, self.ring.payload(record), (to,))
            self.sent_bytes += record.payload_bytes

    def await_second_holder(self, window: Window) -> None:
        """Waits until every slot of a window has a copy; the others may be on their way."""
        self.await_until(lambda: self.acknowledgements.has_second_holder(window))

    def drop_before(self, window: Window) -> None:
        """Forgets the slots of older windows."""
        self._sender.account.update(lambda known: known.dropped_before(window))

    def fetch(self, process: int, key: SlotKey, needed: Container[int]) -> None:
        """Fetches a slot from a process into the ring.

        Args:
            process: who has it.
            key: which one; a replica's, of the same bits, becomes this rank's.
            needed: steps whose slots stay in the ring.

        Raises:
            FetchError: the process does not give it intact and in time.
        """

        def place(record: SlotRecord) -> memoryview:
            try:
                # In a replica's ring it may lie elsewhere than this rank's own would.
                return self.ring.get(record, needed, lay=key.owner == self.ring.owner)
            except RingFullError as error:
                raise RefusedError(str(error)) from error

        record = self._sender.fetch(process, key, place)
        self.moved += 1
        self._faults.strike(key.step, FaultPoint.FETCH)
        self.ring.publish(record)

    def close(self) -> None:
        """Ends the connections; copies on their way are given up."""
        self._sender.close()
