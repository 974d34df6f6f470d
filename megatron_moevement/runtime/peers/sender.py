# SPDX-License-Identifier: Apache-2.0
"""The sender of a process: streams its slots to peers, and gets slots from them.

Each peer that is sent to has a thread and a connection, and more of both for large slots. Where a
transfer fails all of them end, and the peer is reported as silent. The training thread decides when
it is tried again, and whether another process takes its place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.watching.measurements import Work
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.connection import DamagedError, PeerConnection
from megatron_moevement.runtime.peers.copy_account import CopyAccount
from megatron_moevement.runtime.peers.ledger_messages import OwnHistory
from megatron_moevement.runtime.peers.peer_threads import (
    FAILURES,
    MAX_CONNECTIONS,
    Parts,
    PeerThreads,
    carried,
    cut,
)
from megatron_moevement.runtime.peers.slot_messages import Share, key_of
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.handshake import RefusedError, Session
from megatron_moevement.runtime.transport.transport import Address, Deadline
from megatron_moevement.runtime.transport.wire import ProtocolError

__all__ = ["DamagedError", "FetchError", "SilentPeerError", "SlotSender"]


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


class _SlotThread(PeerThreads[_Delivery, None]):
    """Sends one slot after the other; a large one in parts, most of them by other threads."""

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
        self._under_way = Deadline(deadline)
        self._others: Parts[None] = Parts(
            me, process, address, deadline, "slot-part-sender", connections=MAX_CONNECTIONS - 1
        )
        super().__init__(me, process, address, deadline, "slot-sender")

    def _carry_out(self, peer: PeerConnection, request: _Delivery, outcome: Future[None]) -> None:
        owner, record = request.owner, request.record
        key = key_of(owner, record)
        if request.is_accounted and key not in self._account.acknowledgements.owing:
            outcome.cancel()
            return
        self._under_way = Deadline(self._deadline)
        began_s = time.perf_counter()
        try:
            self._tell(peer, self._under_way)
            self._store(peer, owner, record, request.payload)
        except DamagedError as error:
            # Whose memory is it? What is intact here was damaged on the way, or there.
            if not record.damaged_parts(request.payload):
                raise
            self._account.note_damaged(key)
            # Another error: a traceback would keep the payload, and so the ring, for as long.
            outcome.set_exception(DamagedError(str(error)))
        else:
            spent_s = time.perf_counter() - began_s
            size_bytes = 0 if record.is_empty else request.payload.nbytes
            self._account.note_sent(self._process, Work(size_bytes, spent_s))
            self._account.note_acknowledged(key, self._process)
            outcome.set_result(None)

    def _store(
        self, peer: PeerConnection, owner: LogicalRank, record: SlotRecord, payload: memoryview
    ) -> None:
        """Sends a copy, a large one in parts over several connections at a time."""
        share = Share.whole(beside=self._account.acknowledgements.owing)
        (_, own), *others = cut(payload)
        if others:
            share = dataclasses.replace(share, is_last=False)
            outcomes = [
                self._others.ask(
                    partial(_store_part, owner, record, part, dataclasses.replace(share, start=at))
                )
                for at, part in others
            ]
            peer.store(owner, record, own, self._under_way, share=share, halfway=self._halfway)
            for outcome in outcomes:
                carried(outcome)
            # Complete only if what has arrived is what was captured, whoever brought it.
            self._under_way = Deadline(self._deadline)
            share = dataclasses.replace(share, start=payload.nbytes, is_last=True)
            peer.store(owner, record, payload[:0], self._under_way, share=share)
        else:
            peer.store(owner, record, payload, self._under_way, share=share, halfway=self._halfway)

    def hang_up(self) -> None:
        """Makes all threads end soon, without waiting for them."""
        super().hang_up()
        self._others.hang_up()

    def close(self) -> None:
        """Ends the threads; what is not done is given up."""
        super().close()
        self._others.close()

    def _tell(self, peer: PeerConnection, deadline: Deadline) -> None:
        """Lets a spare know all that this rank knows before it gets a slot."""
        history = None if self._history is None else self._history.after(self._told)
        if history is not None:
            peer.tell(history, deadline)
            self._told = history.state.committed

    def _failure(self, request: _Delivery, reason: str) -> SilentPeerError:
        return SilentPeerError(reason)

    def _ended(self, reason: str) -> None:
        self._account.note_silent(self._process, reason, self._under_way.since_s)


def _store_part(  # noqa: PLR0917  (the last two are given by the thread)
    owner: LogicalRank,
    record: SlotRecord,
    part: memoryview,
    share: Share,
    peer: PeerConnection,
    deadline: Deadline,
) -> None:
    peer.store(owner, record, part, deadline, share=share)


def _fetch_part(
    key: SlotKey, start: int, part: memoryview, peer: PeerConnection, deadline: Deadline
) -> SlotRecord:
    return peer.fetch(key, part, deadline, start=start)


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
            deadline: for a transfer to move on, and for its acknowledgement.
            halfway: called when half of a slot was sent, by the thread that sends it.
        """
        self._me = me
        self._deadline = deadline
        self._halfway = halfway
        self._history, self._spares = history, frozenset(spares)
        self._addresses = dict(peers)
        self._peers: dict[int, _SlotThread] = {}
        self._fetching: Parts[SlotRecord] | None = None
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
        self.landed(owner, record, to, held)
        self.send(owner, record, payload, to)

    def landed(
        self, owner: LogicalRank, record: SlotRecord, holders: Iterable[int], held: Iterable[int]
    ) -> None:
        """Declares one of its own slots landed; its copies stay beside all that is sent."""
        self.account.update(lambda known: known.landed(key_of(owner, record), holders, held))

    def send(
        self, owner: LogicalRank, record: SlotRecord, payload: memoryview, to: Iterable[int]
    ) -> dict[int, Future[None]]:
        """Sends copies of a slot, anybody's; returns for each process what becomes of its copy.

        A future ends with `SilentPeerError` or `DamagedError`, or is cancelled by `close`. Its
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

    def fetch(
        self, process: int, key: SlotKey, place: Callable[[SlotRecord], memoryview]
    ) -> SlotRecord:
        """Gets a slot from a peer, straight into memory, and checks every part of it.

        Args:
            place: returns memory of the slot's size for it; what that holds after an error means
                nothing.

        Raises:
            FetchError: the peer does not give it intact and in time.
        """
        try:
            record, into = self._fetch_parts(process, key, place)
            if damaged := record.damaged_parts(into):
                raise DamagedError(
                    f"slot {key.slot} of {key.owner} from process {process}: {damaged[0]} and "
                    f"{len(damaged) - 1} more parts are damaged"
                )
        except FAILURES as error:
            raise FetchError(
                f"slot {key.slot} of {key.owner} from step {key.window.start} on can't be had from "
                f"process {process}: {error}"
            ) from error
        return record

    def _fetch_parts(
        self, process: int, key: SlotKey, place: Callable[[SlotRecord], memoryview]
    ) -> tuple[SlotRecord, memoryview]:
        """Fills memory once it is known which, and how much; returns it with what is said of it.

        Whatever cuts it, no thread writes there any more when it, or `close`, has returned.
        """
        address = self._addresses[process]
        try:
            self._fetching = Parts(
                self._me,
                process,
                address,
                self._deadline,
                "slot-part-fetcher",
                connections=MAX_CONNECTIONS,
            )
            nothing = memoryview(b"")
            record = carried(self._fetching.ask(partial(_fetch_part, key, 0, nothing)))
            into = place(record)
            if record.payload_bytes > into.nbytes:
                raise RefusedError(
                    f"slot {key.slot} of {key.owner} has {record.payload_bytes} bytes, there is "
                    f"room for {into.nbytes}"
                )
            into = into[: record.payload_bytes]
            outcomes = self._fetching.fill(into, partial(_fetch_part, key))
            if any(carried(outcome) != record for outcome in outcomes):
                raise ProtocolError(f"process {process} has another slot in its place by now")
            return record, into
        finally:
            self._end_fetching()

    def _end_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.close()
            self._fetching = None

    def close(self) -> None:
        """Ends all threads and connections; copies under way are given up."""
        self._end_fetching()
        for peer in self._peers.values():
            peer.hang_up()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
