"""The sender of a process: streams its slots to peers, and gets slots from them.

Each peer that is sent to has one thread and one connection. Where a transfer fails both end, and
the peer is reported as silent. The training thread decides when it is tried again, and whether
another process takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Self

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.peer_trouble import Trouble
from megatron_moevement.policy.copies.persistence import Acknowledgements, SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.peers.connection import (
    DamagedSlotError,
    PeerConnection,
)
from megatron_moevement.runtime.peers.copy_account import CopyAccount
from megatron_moevement.runtime.peers.history import OwnHistory
from megatron_moevement.runtime.peers.peer_thread import (
    FAILURES,
    Delivery,
    PeerThread,
    SilentPeerError,
)
from megatron_moevement.runtime.peers.slot_messages import key_of
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address, Deadline

__all__ = ["DamagedSlotError", "FetchError", "SilentPeerError", "SlotSender"]


class FetchError(MoEvementError):
    """A peer did not give an intact slot; another holder may."""


class SlotSender:
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
            me: who this process is.
            peers: for each process its server's address.
            deadline: from the start of a transfer to its acknowledgement.
            halfway: called when half of a slot was sent, by the thread that sends it.
            history: what goes with the slots to spares.
            spares: which of the processes these are.
        """
        self._me = me
        self._deadline = deadline
        self._halfway = halfway
        self._history, self._spares = history, frozenset(spares)
        self._addresses = dict(peers)
        self._peers: dict[int, PeerThread] = {}
        self._account = CopyAccount()

    @property
    def acknowledgements(self) -> Acknowledgements:
        """What is known of the copies of this process's own slots."""
        return self._account.acknowledgements

    @property
    def silent(self) -> Mapping[int, str]:
        """The processes that are sent nothing until they are tried again, each with the reason."""
        return self._account.silent

    @property
    def troubles(self) -> Mapping[int, Trouble]:
        """The processes that have confirmed no copy since a transfer to them failed."""
        return self._account.troubles

    @property
    def damaged(self) -> frozenset[SlotKey]:
        """The slots whose bytes in this process's memory are not those that were captured."""
        return self._account.damaged

    def update(self, change: Callable[[Acknowledgements], Acknowledgements]) -> None:
        """Replaces the acknowledgements by what `change` makes of them, in one go."""
        self._account.update(change)

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
            owner: the rank of this process.
            record: what the slot consists of.
            payload: its bytes, in the ring.
            holders: the processes that are to keep copies and lack them.
            held: the processes that keep one already.
        """
        to = tuple(holders)
        self.update(lambda known: known.landed(key_of(owner, record), to, held))
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
            outcome: Future[None] = Future()
            outcomes[process] = outcome
            delivery = Delivery(
                owner,
                record,
                payload[: record.payload_bytes],
                outcome,
                is_accounted=key_of(owner, record) in self.acknowledgements.owing,
            )
            if process not in self._peers:
                self._peers[process] = PeerThread(
                    self._me,
                    process,
                    self._addresses[process],
                    self._deadline,
                    self._account,
                    halfway=self._halfway,
                    history=self._history if process in self._spares else None,
                )
            self._peers[process].deliver(delivery)
        return outcomes

    def set_address(self, process: int, address: Address) -> None:
        """Sets where a process is; one that was silent is tried again."""
        self._addresses[process] = address
        self.try_again(process)

    def try_again(self, process: int) -> None:
        """Lets a silent process be sent copies again, over a new connection."""
        former = self._peers.pop(process, None)
        if former is not None:
            former.close()
        self._account.forgive(process)

    def await_change(self, timeout: timedelta) -> bool:
        """Waits until a copy was acknowledged, a peer is silent or a slot is found damaged.

        Returns:
            Whether something has changed since the last call.
        """
        return self._account.await_change(timeout)

    def fetch(self, process: int, key: SlotKey, into: memoryview) -> SlotRecord:
        """Gets a slot from a peer, straight into memory, and checks every part of it.

        Args:
            process: who holds it.
            key: which slot.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
