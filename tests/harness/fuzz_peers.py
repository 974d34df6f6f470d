# SPDX-License-Identifier: Apache-2.0
"""Strangers and peers that send a replication server, or answer its clients, mutated messages."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, Self

import torch

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.connection import DamagedError, PeerConnection
from megatron_moevement.runtime.peers.ledger_messages import History
from megatron_moevement.runtime.peers.log_messages import (
    TensorHeader,
    hashes_document,
    step_document,
    tag_document,
)
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.slot_messages import (
    Share,
    range_document,
    share_document,
    slot_document,
)
from megatron_moevement.runtime.peers.state_messages import StateRange, found_document
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.transport.handshake import (
    RefusedError,
    Session,
    answer_call,
    call,
)
from megatron_moevement.runtime.transport.tcp import TCP, TcpConnection
from megatron_moevement.runtime.transport.transport import Deadline
from megatron_moevement.runtime.transport.wire import Channel, Kind, ProtocolError
from tests.harness.fuzz_bytes import as_document, mutated
from tests.harness.one_schedule import one_schedule

_TOKEN = b"a secret of this job"
_OWN, _OTHER = LogicalRank(), LogicalRank(dp=1)
_LIMIT = timedelta(seconds=20)
_SHORT = timedelta(seconds=0.5)
_KEY = SlotKey(_OTHER, Window(0, 3), 1)
_TAG = BoundaryTag(3, Direction.FORWARD, 0, 1, 0)
_STATE = StateRange(3, "head", 0, 500)
_SLOT = SlotRecord(0, Window(0, 3), 1, 1, 100, (SlotPart.of("head", 0, memoryview(bytes(100))),))
_HISTORY = History(
    _OTHER,
    StoreIdentity("run-1", "0123abcd"),
    RingShape.equal(3, 500, 2),
    JournalShape(3, 100, 9),
    JournalState(0, one_schedule(3), 4, Window(0, 3), None),
    {4: b"entry"},
    {3: 0.5, 4: 0.25},
)
_DOCUMENTS: tuple[tuple[Kind, dict[str, Any], int], ...] = (
    (Kind.FETCH, range_document(_KEY, 0, 500), 0),
    (Kind.SLOT, share_document(_OTHER, _SLOT, Share(1, 0, is_last=True)), 100),
    (Kind.SLOT, share_document(_OTHER, _SLOT, Share(1, 40, is_last=False)), 60),
    (Kind.FOUND, slot_document(_OTHER, _SLOT), 100),
    (Kind.HISTORY, _HISTORY.document(), 0),
    (Kind.RECEIVED, step_document(3), 0),
    (Kind.HASHES, hashes_document({_TAG: 7}), 0),
    (Kind.LOG, tag_document(_TAG), 0),
    (Kind.LOGGED, TensorHeader(torch.float32, (2, 3), 7).document(), 24),
    (Kind.STATE, _STATE.document(), 0),
    (Kind.STATE_PART, found_document(_STATE, 100, 7), 100),
    (Kind.REFUSED, {"reason": "no", "damaged": 1}, 0),
)
_HELLO = b"MOEV\x02\x01" + bytes(26)
_EXPECTED = (OSError, ProtocolError, RefusedError, DamagedError)


class Peers:
    """A server, and those who talk to it or answer for it."""

    def __init__(self, folder: Path) -> None:
        """Starts a server that keeps slots in a folder."""
        identity = StoreIdentity("run-1", "0123abcd")
        self._rings = [
            RingFile.create(folder / f"{owner}.ring", identity, owner, RingShape.equal(3, 500, 2))
            for owner in (_OWN, _OTHER)
        ]
        slots = StoredSlots(self._rings[0])
        slots.keep(self._rings[1])
        self._me, self._peer = Session(_TOKEN, 0, 5), Session(_TOKEN, 1, 5)
        self._failures: list[BaseException] = []
        self._hook, threading.excepthook = threading.excepthook, self._note
        self._server = ReplicaServer("127.0.0.1", self._me, slots, deadline=_SHORT)

    def feed_caller(self, random: Random) -> None:
        """Says something before any proof."""
        known = [_HELLO, _HELLO + json.dumps(_DOCUMENTS[0][1]).encode()]
        with (
            socket.create_connection(self._server.address, _LIMIT.total_seconds()) as one,
            contextlib.suppress(OSError),
        ):
            one.sendall(mutated(random, known))
            one.shutdown(socket.SHUT_WR)
            while one.recv(65536):
                pass
        self._check()

    def feed_request(self, random: Random) -> None:
        """Says something after the proofs."""
        connection = socket.create_connection(self._server.address)
        with Channel(TcpConnection(connection)) as channel:
            call(channel, self._peer, 0, Deadline(_LIMIT))
            with contextlib.suppress(*_EXPECTED):
                for _ in range(3):
                    self._say(random, channel)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(_LIMIT.total_seconds())
                while connection.recv(65536):
                    pass
        self._check()

    def feed_answer(self, random: Random) -> None:
        """Answers a question with something else."""
        listener = socket.create_server(("127.0.0.1", 0))
        answering = threading.Thread(target=self._answer, args=(random, listener))
        answering.start()
        try:
            with (
                contextlib.suppress(*_EXPECTED),
                PeerConnection(
                    self._peer, 0, listener.getsockname()[:2], Deadline(_LIMIT)
                ) as connection,
            ):
                self._question(random)(connection)
        finally:
            answering.join()
            listener.close()
        self._check()

    def _question(self, random: Random) -> Callable[[PeerConnection], object]:
        questions: tuple[Callable[[PeerConnection], object], ...] = (
            lambda peer: peer.fetch(_KEY, memoryview(bytearray(500)), Deadline(_SHORT)),
            lambda peer: peer.fetch_logged(_TAG, 500, Deadline(_SHORT)),
            lambda peer: peer.fetch_received(3, Deadline(_SHORT)),
            lambda peer: peer.fetch_state(_STATE, memoryview(bytearray(500)), Deadline(_SHORT)),
        )
        return random.choice(questions)

    def _answer(self, random: Random, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with Channel(TcpConnection(connection)) as channel, contextlib.suppress(*_EXPECTED):
            answer_call(channel, self._me, Deadline(_LIMIT))
            channel.receive(Deadline(_LIMIT))
            self._say(random, channel)

    def _say(self, random: Random, channel: Channel) -> None:
        kind, known, size = random.choice(_DOCUMENTS)
        document = as_document(random, known)
        if random.random() < 0.3:
            size = random.choice((0, 6, 24, 100, 400, 3000))
        if random.random() < 0.2:
            kind = random.choice(list(Kind))
        payload = memoryview(random.randbytes(size)) if size else None
        generation = random.choice((5, 5, 5, 4, 2**63))
        channel.send(kind, generation, document, payload, Deadline(_SHORT))

    def _check(self) -> None:
        if self._failures:
            raise self._failures.pop()
        with Channel(TCP.dial(self._server.address, Deadline(_LIMIT))) as channel:
            call(channel, self._peer, 0, Deadline(_LIMIT))  # it is there for peers

    def _note(self, failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None:
            self._failures.append(failure.exc_value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        threading.excepthook = self._hook
        for ring in self._rings:
            ring.close()
