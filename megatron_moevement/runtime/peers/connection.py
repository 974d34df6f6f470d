# SPDX-License-Identifier: Apache-2.0
"""A connection to the server of a peer: what is asked on it, and what the answers mean."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.ledger_messages import History
from megatron_moevement.runtime.peers.log_messages import (
    TensorHeader,
    hashes_of_document,
    step_document,
    tag_document,
)
from megatron_moevement.runtime.peers.slot_messages import (
    Share,
    key_of,
    range_document,
    share_document,
    slot_of_document,
)
from megatron_moevement.runtime.peers.state_messages import StateRange, found_of_document
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.runtime.transport.handshake import RefusedError, Session, call
from megatron_moevement.runtime.transport.transport import Address, Connection, Deadline
from megatron_moevement.runtime.transport.wire import Channel, Kind, Message, ProtocolError
from megatron_moevement.runtime.upstream_log.log import tensor_bytes, tensor_hash


class DamagedError(MoEvementError):
    """Bytes are not those that were captured, sent in training, or read to be sent."""


class PeerConnection(Closing):
    """An authenticated connection to a peer; one thread uses it.

    Every request raises ProtocolError where the answer is none, OSError where the connection broke
    or no answer came in time, and RefusedError where the peer does not have or keep what is asked.
    """

    def __init__(
        self,
        me: Session,
        process: int,
        address: Address,
        deadline: Deadline,
        opened: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        """Connects.

        Args:
            opened: is given the connection before it connects, to be able to shut it down.

        Raises:
            ProtocolError: somebody else answers.
            RefusedError: the peer lives in another generation.
            OSError: nobody answers in time.
        """
        self._me = me
        self._process = process
        self._channel = Channel(me.transport.dial(address, deadline, opened))
        try:
            call(self._channel, me, process, deadline)
        except BaseException:
            self._channel.close()
            raise

    def store(
        self,
        owner: LogicalRank,
        record: SlotRecord,
        payload: memoryview,
        deadline: Deadline,
        *,
        share: Share,
        halfway: Callable[[SlotRecord], None] = lambda record: None,
    ) -> None:
        """Sends bytes of a copy of a slot and waits until the peer has them.

        Args:
            payload: the bytes of the share.
            halfway: called when half of them was sent.

        Raises:
            DamagedError: it arrived damaged.
        """
        self._channel.send(
            Kind.SLOT,
            self._me.generation,
            share_document(owner, record, share),
            payload,
            deadline,
            halfway=lambda: halfway(record),
        )
        self._answer(Kind.STORED, deadline)

    def tell(self, history: History, deadline: Deadline) -> None:
        """Tells a spare what goes with the slots that follow, and waits until it has it."""
        self._channel.send(Kind.HISTORY, self._me.generation, history.document(), None, deadline)
        self._answer(Kind.STORED, deadline)

    def fetch(
        self, key: SlotKey, into: memoryview, deadline: Deadline, *, start: int = 0
    ) -> SlotRecord:
        """Gets the bytes of a slot that belong into memory, straight there; the caller checks them.

        Args:
            into: the slot's memory from `start` on; a slot may end within it, or before.

        Raises:
            DamagedError: it is damaged there.
            RefusedError: the peer does not hold it.
        """
        document = range_document(key, start, into.nbytes)
        self._channel.send(Kind.FETCH, self._me.generation, document, None, deadline)
        message = self._answer(Kind.FOUND, deadline)
        owner, record = slot_of_document(message.document)
        size_bytes = min(into.nbytes, max(record.payload_bytes - start, 0))
        if key_of(owner, record) != key or size_bytes != message.payload_bytes:
            raise ProtocolError(f"process {self._process} answers with another slot than {key}")
        self._channel.receive_into(into[:size_bytes], deadline)
        return record

    def fetch_logged(self, tag: BoundaryTag, max_bytes: int, deadline: Deadline) -> torch.Tensor:
        """Gets a tensor from the peer's upstream log.

        Args:
            max_bytes: a larger one is refused before anything is allocated.

        Raises:
            DamagedError: it arrived damaged.
            RefusedError: the peer does not have it, or not as it was logged.
        """
        self._channel.send(Kind.LOG, self._me.generation, tag_document(tag), None, deadline)
        message = self._answer(Kind.LOGGED, deadline)
        header = TensorHeader.of_document(message.document)
        if header.size_bytes != message.payload_bytes or header.size_bytes > max_bytes:
            raise ProtocolError(
                f"process {self._process} sends {message.payload_bytes} bytes for a tensor of "
                f"{header.size_bytes}, at most {max_bytes} are expected"
            )
        tensor = torch.empty(header.shape, dtype=header.dtype)
        self._channel.receive_into(tensor_bytes(tensor), deadline)
        if tensor_hash(tensor) != header.hash:
            raise DamagedError(f"{tag} from process {self._process} arrived damaged")
        return tensor

    def fetch_received(self, step: int, deadline: Deadline) -> dict[BoundaryTag, int]:
        """Gets the hashes that the peer kept of what it received in a step."""
        self._channel.send(Kind.RECEIVED, self._me.generation, step_document(step), None, deadline)
        return hashes_of_document(self._answer(Kind.HASHES, deadline).document)

    def fetch_state(self, wanted: StateRange, into: memoryview, deadline: Deadline) -> int:
        """Gets bytes of the peer's live state, straight into memory.

        Args:
            wanted: as many as memory has room for; the part may end within it, or before.

        Returns:
            How many bytes the part has.

        Raises:
            DamagedError: they arrived damaged.
            RefusedError: the peer offers no such state.
        """
        self._channel.send(Kind.STATE, self._me.generation, wanted.document(), None, deadline)
        message = self._answer(Kind.STATE_PART, deadline)
        part_bytes, checksum = found_of_document(message.document, wanted)
        size_bytes = min(into.nbytes, max(part_bytes - wanted.start, 0))
        if message.payload_bytes != size_bytes:
            raise ProtocolError(
                f"process {self._process} sends {message.payload_bytes} bytes of {wanted.part}, "
                f"{size_bytes} are expected"
            )
        self._channel.receive_into(into[:size_bytes], deadline)
        if checksum_of(into[:size_bytes]) != checksum:
            raise DamagedError(f"{wanted.part} from process {self._process} arrived damaged")
        return part_bytes

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def _answer(self, kind: Kind, deadline: Deadline) -> Message:
        message = self._channel.receive(deadline)
        if message.kind is Kind.REFUSED and not message.payload_bytes:
            reason = str(message.document.get("reason"))
            raise (DamagedError if message.document.get("damaged") else RefusedError)(reason)
        if message.kind is not kind or (
            kind in {Kind.STORED, Kind.HASHES} and message.payload_bytes
        ):
            raise ProtocolError(f"{message.kind.name} where {kind.name} was expected")
        return message
