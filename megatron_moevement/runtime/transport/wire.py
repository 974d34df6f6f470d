# SPDX-License-Identifier: Apache-2.0
"""Messages between two processes: a fixed header, JSON of bounded length, and raw bytes.

Nothing is allocated before its length was compared with a limit, and nothing that arrives is ever
run: no pickle. Once both ends have proved who they are, each message carries a BLAKE3 hash under a
key of its connection and direction. Messages are counted in it, so that none can be altered, left
out, repeated, or sent back. A payload carries a tag of AES-GMAC under a key that only the hash of
its message gives: that takes a third of the time, and the interpreter runs other threads meanwhile.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import struct
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from megatron_moevement.errors import MoEvementError
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.transport.transport import Connection, Deadline

PROTOCOL_VERSION = 5
MAX_DOCUMENT_BYTES = 16 * 2**20
"""Of a peer that has proved that it belongs to the job: room for a slot of 100,000 parts."""

_MAGIC = b"MOEV"
_HEADER = struct.Struct("<4sBBIQQ")
_CHECKSUM = struct.Struct("<Q")
"""After the header: of header and document. A payload has the checksums of its parts."""
_PROOF_BYTES = 32
_PAYLOAD_KEY_BYTES = 32
_NONCE = bytes(12)
_SCRATCH_BYTES = 2**16
_PIECE_BYTES = 2**20
"""Of a payload, so that it is in the processor's cache while it is proved and sent."""


class Kind(IntEnum):
    """What a message is about."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    SLOT = 5
    STORED = 6
    FETCH = 7
    FOUND = 8
    REFUSED = 9
    LOG = 10
    LOGGED = 11
    RECEIVED = 12
    HASHES = 13
    STATE = 14
    STATE_PART = 15
    HISTORY = 16


class ProtocolError(MoEvementError):
    """The peer says what nobody of this job would say; the connection ends."""


@dataclasses.dataclass(frozen=True)
class Message:
    """What has arrived of a message: all but its payload.

    Attributes:
        generation: in which the peer sent it.
    """

    kind: Kind
    generation: int
    document: Mapping[str, Any]
    payload_bytes: int


class _Proofs:
    """Proofs of what goes in one direction of a connection, in order."""

    def __init__(self, key: bytes) -> None:
        """Proves by a key of 32 bytes."""
        self._key = key
        self._number = 0
        self._payload: AEADEncryptionContext  # of the message that has begun

    def begin(self, *parts: bytes | bytearray) -> bytes:
        """Returns the proof of the next message; of its payload, `add` and `end` do it."""
        hashed = blake3(struct.pack("<Q", self._number), key=self._key)
        self._number += 1
        for part in parts:
            hashed.update(part)
        digest = hashed.digest(_PROOF_BYTES + _PAYLOAD_KEY_BYTES)
        # The hash goes on for as long as one asks, and no part of it gives another: what is not
        # sent is a key that no other message has, so one nonce is enough.
        self._payload = Cipher(AES(digest[_PROOF_BYTES:]), GCM(_NONCE)).encryptor()
        return digest[:_PROOF_BYTES]

    def add(self, piece: memoryview) -> None:
        self._payload.authenticate_additional_data(piece)

    def end(self) -> bytes:
        self._payload.finalize()
        return self._payload.tag


class Channel(Closing):
    """Messages on a connection; one thread sends and receives on it.

    Whatever sends or receives raises OSError where the peer is gone, or too slow for the deadline,
    which what is carried moves.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent: _Proofs | None = None
        self._received: _Proofs | None = None
        self._expected_bytes = 0
        """Of a payload that has not arrived whole."""

    def secure(self, sent_key: bytes, received_key: bytes) -> None:
        """From now on every message is proved, in both directions.

        Args:
            sent_key: of what this end sends; 32 bytes, of no other connection.
        """
        self._sent, self._received = _Proofs(sent_key), _Proofs(received_key)

    def send(
        self,
        kind: Kind,
        generation: int,
        document: Mapping[str, Any],
        payload: memoryview | None,
        deadline: Deadline,
        *,
        halfway: Callable[[], None] = lambda: None,
    ) -> None:
        """Sends a message; the payload goes out of the memory where it is.

        Args:
            halfway: called in the middle of the payload.
        """
        text = json.dumps(document).encode()
        payload_bytes = 0 if payload is None else payload.nbytes
        header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, len(text), payload_bytes, generation)
        checksum = _CHECKSUM.pack(checksum_of(header + text))
        proof = b"" if self._sent is None else self._sent.begin(header, text)
        self._connection.send(header + checksum + text + proof, deadline)
        if payload is not None:
            middle = payload_bytes // 2
            self._send_pieces(payload[:middle], deadline)
            halfway()
            self._send_pieces(payload[middle:], deadline)
        if payload_bytes and self._sent is not None:
            self._connection.send(self._sent.end(), deadline)

    def _send_pieces(self, payload: memoryview, deadline: Deadline) -> None:
        for start in range(0, payload.nbytes, _PIECE_BYTES):
            piece = payload[start : start + _PIECE_BYTES]
            if self._sent is not None:
                self._sent.add(piece)
            self._connection.send(piece, deadline)
            deadline.carried(piece.nbytes)

    def await_message(self) -> None:
        """Waits until a message begins, or the peer hangs up."""
        self._connection.await_bytes()

    def receive(self, deadline: Deadline, max_document_bytes: int = MAX_DOCUMENT_BYTES) -> Message:
        """Receives a message up to its payload.

        Raises:
            ProtocolError: it is no message, or too long.
        """
        start = bytearray(_HEADER.size + _CHECKSUM.size)
        self._fill(memoryview(start), deadline)
        header, checksum = start[: _HEADER.size], start[_HEADER.size :]
        magic, version, number, length, payload_bytes, generation = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise ProtocolError(f"no message of ours: {bytes(header[:8])!r}")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version}, mine is {PROTOCOL_VERSION}")
        if length > max_document_bytes:
            raise ProtocolError(f"a document of {length} bytes, at most {max_document_bytes}")
        if number not in Kind.__members__.values():
            raise ProtocolError(f"no kind of message: {number}")
        text = bytearray(length)
        self._fill(memoryview(text), deadline)
        if _CHECKSUM.pack(checksum_of(header + text)) != checksum:
            raise ProtocolError("a message that was damaged on its way")
        if self._received is not None:
            self._check(self._received.begin(header, text), deadline)
        self._expected_bytes = payload_bytes
        return Message(Kind(number), generation, _parsed(text), payload_bytes)

    def receive_into(
        self,
        target: memoryview,
        deadline: Deadline,
        arrived: Callable[[memoryview], None] = lambda piece: None,
    ) -> None:
        """Fills memory with the bytes of a payload that come next; checks it with the last ones.

        Args:
            arrived: called with each piece that has come, in their order.

        Raises:
            ProtocolError: it is not what the peer sent.
        """
        self._fill(target, deadline, self._received, arrived)
        self._expected_bytes -= target.nbytes
        if self._received is not None and target.nbytes and not self._expected_bytes:
            self._check(self._received.end(), deadline)

    def _check(self, proof: bytes, deadline: Deadline) -> None:
        sent = bytearray(len(proof))
        self._fill(memoryview(sent), deadline)
        if not hmac.compare_digest(proof, bytes(sent)):
            raise ProtocolError("what arrived is not what the peer sent")

    def _fill(
        self,
        target: memoryview,
        deadline: Deadline,
        proofs: _Proofs | None = None,
        arrived: Callable[[memoryview], None] = lambda piece: None,
    ) -> None:
        while target.nbytes:
            received = self._connection.receive_into(target[:_PIECE_BYTES], deadline)
            deadline.carried(received)
            if proofs is not None:
                proofs.add(target[:received])
            arrived(target[:received])
            target = target[received:]

    def discard(self, size_bytes: int, deadline: Deadline) -> None:
        """Receives bytes that nobody wants."""
        scratch = memoryview(bytearray(min(size_bytes, _SCRATCH_BYTES)))
        while size_bytes:
            piece = scratch[: min(size_bytes, _SCRATCH_BYTES)]
            self.receive_into(piece, deadline)
            size_bytes -= piece.nbytes

    def hang_up(self) -> None:
        """Ends the connection; a thread that waits in it is woken. Any thread may call it."""
        self._connection.shut_down()

    def close(self) -> None:
        """Gives the connection back; called by the thread that uses it."""
        self._connection.close()


def _parsed(text: bytearray) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a document that is no JSON") from error
    if not isinstance(document, dict):
        raise ProtocolError("a document that is no object")
    return document
