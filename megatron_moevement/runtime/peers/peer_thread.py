"""The thread that sends copies to one peer over one connection, one after the other."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.peers.connection import (
    DamagedSlotError,
    PeerConnection,
)
from megatron_moevement.runtime.peers.copy_account import CopyAccount
from megatron_moevement.runtime.peers.history import OwnHistory
from megatron_moevement.runtime.peers.slot_messages import key_of
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.handshake import RefusedError, Session
from megatron_moevement.runtime.transport.transport import Address, Connection, Deadline
from megatron_moevement.runtime.transport.wire import ProtocolError

FAILURES = (OSError, ProtocolError, RefusedError, DamagedSlotError)
"""What a connection to a peer may end with."""


class SilentPeerError(MoEvementError):
    """A peer did not acknowledge a copy in time, broke the connection or refused it."""


@dataclasses.dataclass(frozen=True)
class Delivery:
    """A copy that waits for its turn; its bytes stay where they are.

    Attributes:
        owner: whose slot.
        record: what it consists of.
        payload: its bytes.
        outcome: what becomes of it.
        is_accounted: whether it is sent only for as long as the slot is accounted for: then its
            bytes make room for another slot.
    """

    owner: LogicalRank
    record: SlotRecord
    payload: memoryview
    outcome: Future[None]
    is_accounted: bool = False


class PeerThread:
    """Sends what is queued until a transfer fails, or the sender is closed."""

    def __init__(
        self,
        me: Session,
        process: int,
        address: Address,
        deadline: timedelta,
        account: CopyAccount,
        *,
        halfway: Callable[[SlotRecord], None] = lambda record: None,
        history: OwnHistory | None = None,
    ) -> None:
        """Starts the thread, which connects at once.

        Args:
            me: who this process is.
            process: the peer.
            address: of its server.
            deadline: for connecting, and for each transfer with its acknowledgement.
            account: where the outcome is noted.
            halfway: called when half of a slot was sent.
            history: what goes with the slots, where the peer is a spare.
        """
        self._me = me
        self._process = process
        self._address = address
        self._deadline = deadline
        self._account = account
        self._halfway = halfway
        self._history = history
        self._told: int | None = None
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._closed = False
        self._end: str | None = None
        self._began_s = 0.0  # of the transfer under way
        name = f"slot-sender {process}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def deliver(self, delivery: Delivery) -> None:
        """Queues a copy; it fails at once where the peer is silent already."""
        with self._lock:
            if self._end is None:
                self._waiting.put(delivery)
                return
            reason = self._end
        delivery.outcome.set_exception(SilentPeerError(reason))

    def hang_up(self) -> None:
        """Makes the thread end soon, without waiting for it."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)
            if self._connection is not None:
                self._connection.shut_down()

    def close(self) -> None:
        """Ends the thread; what is not acknowledged is given up."""
        self.hang_up()
        self._thread.join()

    def _run(self) -> None:
        current: Delivery | None = None
        reason = "its thread ended"
        self._began_s = time.monotonic()
        try:
            deadline = Deadline(self._deadline)
            with PeerConnection(
                self._me, self._process, self._address, deadline, self._opened
            ) as peer:
                while (current := self._waiting.get()) is not None:
                    self._transfer(peer, current)
        except FAILURES as error:
            reason = str(error) or type(error).__name__
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._finish(reason, current)

    def _opened(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._closed:
                raise ConnectionAbortedError("closed")

    def _transfer(self, peer: PeerConnection, delivery: Delivery) -> None:
        """Sends one copy; raises what makes the peer silent."""
        owner, record = delivery.owner, delivery.record
        key = key_of(owner, record)
        if delivery.is_accounted and key not in self._account.acknowledgements.owing:
            delivery.outcome.cancel()
            return
        self._began_s = time.monotonic()
        try:
            deadline = Deadline(self._deadline)
            self._tell(peer, deadline)
            peer.store(owner, record, delivery.payload, deadline, self._halfway)
        except DamagedSlotError as error:
            # Whose memory is it? What is intact here was damaged on the way, or there.
            if not record.damaged_parts(delivery.payload):
                raise
            self._account.note_damaged(key)
            # Another error: a traceback would keep the payload, and so the ring, for as long.
            delivery.outcome.set_exception(DamagedSlotError(str(error)))
        else:
            self._account.note_acknowledged(key, self._process)
            delivery.outcome.set_result(None)

    def _tell(self, peer: PeerConnection, deadline: Deadline) -> None:
        """Lets a spare know all that this rank knows before it gets a slot."""
        history = None if self._history is None else self._history.after(self._told)
        if history is not None:
            peer.tell(history, deadline)
            self._told = history.state.committed

    def _finish(self, reason: str, current: Delivery | None) -> None:
        """Tells of the end, first the account, then who waits for a copy."""
        with self._lock:
            self._end = reason
        if not self._closed:
            self._account.note_silent(self._process, reason, self._began_s)
        left = [current]
        while not self._waiting.empty():
            left.append(self._waiting.get())
        for delivery in left:
            if delivery is None:
                continue
            if self._closed:
                delivery.outcome.cancel()
            else:
                delivery.outcome.set_exception(SilentPeerError(reason))
