"""The sender of a process: streams its slots to peers, and gets slots from them.

Each peer that is sent to has one thread and one connection. Where a transfer fails both end, and
the peer is reported as silent. The training thread decides when it is tried again, and whether
another process takes its place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.connection import DamagedSlotError, PeerConnection
from megatron_moevement.runtime.peers.copy_account import CopyAccount
from megatron_moevement.runtime.peers.ledger_messages import OwnHistory
from megatron_moevement.runtime.peers.peer_thread import FAILURES, PeerThread
from megatron_moevement.runtime.peers.slot_messages import key_of
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address, Deadline

__all__ = ["DamagedSlotError", "FetchError", "SilentPeerError", "SlotSender"]


class SilentPeerError(MoEvementError):
    """A peer did not acknowledge a copy in time, broke the connection or refused it."""


class FetchError(MoEvementError):
    """A peer did not give an intact slot; another holder may."""


@dataclasses.dataclass(frozen=True)
class _Delivery:
    """A copy that waits for its turn; its bytes stay where they are.

    Attributes:
        is_accounted: whether it is sent only for as long as the slot is accounted for: then its
            bytes make room for another slot.
    """

    owner: LogicalRank
    record: SlotRecord
    payload: memoryview
    is_accounted: bool


class _SlotThread(PeerThread[_Delivery, None]):
    def __init__(
        self,
        me: Session,
        process: int,
        address: Address,
        deadline: timedelta,
        account: CopyAccount,
        *,
        halfway: Callable[[SlotRecord], None],
        history: OwnHistory | None,
    ) -> None:
        self._account = account
        self._halfway = halfway
        self._history = history
        self._told: int | None = None
        self._began_s = time.monotonic()  # the transfer under way
        super().__init__(me, process, address, deadline, "slot-sender")

    def _carry_out(self, peer: PeerConnection, request: _Delivery, outcome: Future[None]) -> None:
        owner, record = request.owner, request.record
        key = key_of(owner, record)
        if request.is_accounted and key not in self._account.acknowledgements.owing:
            outcome.cancel()
            return
        self._began_s = time.monotonic()
        try:
            deadline = Deadline(self._deadline)
            self._tell(peer, deadline)
            peer.store(owner, record, request.payload, deadline, self._halfway)
        except DamagedSlotError as error:
            # Whose memory is it? What is intact here was damaged on the way, or there.
            if not record.damaged_parts(request.payload):
                raise
            self._account.note_damaged(key)
            # Another error: a traceback would keep the payload, and so the ring, for as long.
            outcome.set_exception(DamagedSlotError(str(error)))
        else:
            self._account.note_acknowledged(key, self._process)
            outcome.set_result(None)

    def _tell(self, peer: PeerConnection, deadline: Deadline) -> None:
        """Lets a spare know all that this rank knows before it gets a slot."""
        history = None if self._history is None else self._history.after(self._told)
        if history is not None:
            peer.tell(history, deadline)
            self._told = history.state.committed

    def _failure(self, request: _Delivery, reason: str) -> SilentPeerError:
        return SilentPeerError(reason)

    def _ended(self, reason: str) -> None:
        self._account.note_silent(self._process, reason, self._began_s)


class SlotSender(Closing):
    """Sends copies of slots in the background, and keeps the account of who has which.

    One thread calls it at a time. A payload must stay untouched until all its copies
    are acknowledged, refused or given up: the ring of the policy sees to it.
    """

    def __init__(
        self,
        me: Session,
        peers: Mapping[int, Address],
        *,
        deadline: timedelta,
        halfway: Callable[[SlotRecord], None] = lambda record: None,
        history: OwnHistory | None = None,
        spares: Collection[int] = (),
    ) -> None:
        """Connects to nobody yet.

        Args:
            deadline: from the start of a transfer to its acknowledgement.
            halfway: called when half of a slot was sent, by the thread that sends it.
        """
        self._me = me
        self._deadline = deadline
        self._halfway = halfway
        self._history, self._spares = history, frozenset(spares)
        self._addresses = dict(peers)
        self._peers: dict[int, _SlotThread] = {}
        self.account = CopyAccount()

    def land(
        self,
        owner: LogicalRank,
        record: SlotRecord,
        payload: memoryview,
        holders: Iterable[int],
        held: Iterable[int] = (),
    ) -> None:
        """Declares one of its own slots landed, and sends it to its holders.

        Args:
            holders: the processes that are to keep copies and lack them.
        """
        to = tuple(holders)
        self.account.update(lambda known: known.landed(key_of(owner, record), to, held))
        self.send(owner, record, payload, to)

    def send(
        self, owner: LogicalRank, record: SlotRecord, payload: memoryview, to: Iterable[int]
    ) -> dict[int, Future[None]]:
        """Sends copies of a slot, anybody's; returns for each process what becomes of its copy.

        A future ends with `SilentPeerError` or `DamagedSlotError`, or is cancelled by `close`. Its
        result is None: the peer has checked the copy and holds it.

        Raises:
            KeyError: no address of a process is known.
        """
        outcomes: dict[int, Future[None]] = {}
        for process in to:
            delivery = _Delivery(
                owner,
                record,
                payload[: record.payload_bytes],
                key_of(owner, record) in self.account.acknowledgements.owing,
            )
            if process not in self._peers:
                self._peers[process] = _SlotThread(
                    self._me,
                    process,
                    self._addresses[process],
                    self._deadline,
                    self.account,
                    halfway=self._halfway,
                    history=self._history if process in self._spares else None,
                )
            outcomes[process] = self._peers[process].ask(delivery)
        return outcomes

    def try_again(self, process: int) -> None:
        """Lets a silent process be sent copies again, over a new connection."""
        former = self._peers.pop(process, None)
        if former is not None:
            former.close()
        self.account.forgive(process)

    def fetch(self, process: int, key: SlotKey, into: memoryview) -> SlotRecord:
        """Gets a slot from a peer, straight into memory, and checks every part of it.

        Args:
            into: memory of at least the slot's size; what it holds after an error means nothing.

        Raises:
            FetchError: the peer does not give it intact and in time.
        """
        deadline = Deadline(self._deadline)
        try:
            with PeerConnection(self._me, process, self._addresses[process], deadline) as peer:
                return peer.fetch(key, into, deadline)
        except FAILURES as error:
            raise FetchError(
                f"slot {key.slot} of {key.owner} from step {key.window.start} on can't be had from "
                f"process {process}: {error}"
            ) from error

    def close(self) -> None:
        """Ends all threads and connections; copies under way are given up."""
        for peer in self._peers.values():
            peer.hang_up()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
