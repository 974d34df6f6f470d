# SPDX-License-Identifier: Apache-2.0
"""The server of a process: takes copies of others' slots into its rings, and gives slots back.

It listens on the one interface that it is told, and has a thread for each connection.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.commit import is_current
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.peers.ledger_messages import History
from megatron_moevement.runtime.peers.log_messages import (
    TensorHeader,
    hashes_document,
    step_of_document,
    tag_of_document,
)
from megatron_moevement.runtime.peers.slot_messages import (
    Share,
    key_of,
    range_of_document,
    slot_document,
    slot_of_document,
)
from megatron_moevement.runtime.peers.state_messages import OfferedState, StateRange, found_document
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.priority import lower_priority
from megatron_moevement.runtime.slots.arrivals import Arrivals, ArrivingParts
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.transport.admission import Admission, SparseLog
from megatron_moevement.runtime.transport.handshake import RefusedError, Session, answer_call
from megatron_moevement.runtime.transport.transport import Deadline
from megatron_moevement.runtime.transport.wire import Channel, Kind, Message, ProtocolError
from megatron_moevement.runtime.upstream_log.log import UpstreamLog, tensor_bytes

logger = logging.getLogger(__name__)

_HANDSHAKE_TIME = timedelta(seconds=10)
_PAUSE_S = 0.1
"""After a failure to accept, for want of descriptors for example."""


class ReplicaServer(Closing):
    """Receives copies and answers requests until it is closed."""

    def __init__(
        self,
        interface: str,
        me: Session,
        slots: StoredSlots,
        *,
        deadline: timedelta,
        log: UpstreamLog | None = None,
        max_unproven: int = 128,
        max_proved: int = 1024,
        halfway: Callable[[Kind], None] = lambda kind: None,
    ) -> None:
        """Starts to listen.

        Args:
            interface: host name or IP address of this machine, `--moevement-replication-interface`.
            deadline: for a message that has begun to move on.
            max_unproven: as many callers are connected at a time that have not proved who they
                are; one more takes the place of another.
            max_proved: as many peers are connected at a time; more are hung up on.
            halfway: called with the kind of an answer when half of its payload was sent.

        Raises:
            UserError: the interface is none of this machine's, or all of them.
        """
        self._me = me
        self._slots = slots
        self._deadline = deadline
        self._log = log
        self._state: OfferedState | None = None
        self._admission = Admission(max_unproven, max_proved)
        self._most_threads = max_proved + 2 * max_unproven
        self._lines = SparseLog(logger)
        self._halfway = halfway
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._arrivals = Arrivals()
        self._connections: dict[Channel, threading.Thread] = {}
        self._is_closed = False
        self._listener = me.transport.listen(interface)
        self.address = self._listener.address
        self._acceptor = threading.Thread(target=self._accept, name="replica-server", daemon=True)
        self._acceptor.start()

    def offer(self, state: OfferedState | None) -> None:
        """Lets peers read the live state, which must not change until nothing is offered."""
        self._state = state

    def close(self) -> None:
        """Ends all connections and threads; what was only half received is not held."""
        with self._lock:
            self._is_closed = True
            threads = list(self._connections.values())
            for channel in self._connections:
                channel.hang_up()
        self._listener.shut_down()
        self._acceptor.join()
        for thread in threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, port) = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                logger.exception("replication: can't accept a connection")
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                if self._is_closed or len(self._connections) >= self._most_threads:
                    connection.close()
                    continue
                channel = Channel(connection)
                thread = threading.Thread(
                    target=self._serve,
                    args=(channel, f"{host}:{port}"),
                    name=f"replica-server {port}",
                    daemon=True,
                )
                self._connections[channel] = thread
                left = self._admission.enter(channel, host)
                thread.start()
            if left is not None:
                text = "replication: a caller at %s is hung up on: too many proved nothing"
                self._lines.write(logging.WARNING, text, left)

    def _serve(self, channel: Channel, caller: str) -> None:
        """Answers one peer until it hangs up or breaks the protocol."""
        lower_priority()

        def admit(process: int) -> None:
            nonlocal caller
            caller = f"process {process} at {caller}"
            if not self._admission.prove(channel):
                raise ProtocolError("too many peers")

        try:
            answer_call(channel, self._me, Deadline(_HANDSHAKE_TIME), admit)
            while True:
                channel.await_message()
                deadline = Deadline(self._deadline)
                self._answer(channel, channel.receive(deadline), deadline)
        except (ProtocolError, RefusedError) as error:
            text = "replication: connection of %s is closed: %s"
            self._lines.write(logging.WARNING, text, caller, str(error))
        except OSError as error:
            if not self._is_closed:
                text = "replication: connection of %s ended: %s"
                self._lines.write(logging.DEBUG, text, caller, str(error))
        finally:
            self._admission.leave(channel)
            with self._lock:
                self._connections.pop(channel, None)
            channel.close()

    def _answer(self, channel: Channel, message: Message, deadline: Deadline) -> None:
        if not is_current(message.generation, self._me.generation):
            raise ProtocolError(
                f"a message of generation {message.generation} in {self._me.generation}"
            )
        if message.payload_bytes and message.kind is not Kind.SLOT:
            raise ProtocolError("a request with a payload")
        answer = self._answer_to(channel, message, deadline)
        channel.send(
            answer.kind,
            self._me.generation,
            answer.document,
            answer.payload,
            deadline,
            halfway=lambda: self._halfway(answer.kind),
        )

    def _answer_to(self, channel: Channel, message: Message, deadline: Deadline) -> _Answer:
        match message.kind:
            case Kind.SLOT:
                return self._take(channel, message, deadline)
            case Kind.HISTORY:
                return self._learn(message)
            case Kind.FETCH:
                return self._give(message)
            case Kind.LOG:
                return self._give_logged(message)
            case Kind.RECEIVED:
                return self._give_hashes(message)
            case Kind.STATE:
                return self._give_state(message)
        raise ProtocolError(f"{message.kind.name} is no request")

    def _take(self, channel: Channel, message: Message, deadline: Deadline) -> _Answer:
        """Receives bytes of a slot into its ring; it is held once every part was checked."""
        owner, record = slot_of_document(message.document)
        share = Share.of_document(message.document)
        stop = share.start + message.payload_bytes
        if stop > record.payload_bytes or (share.is_last and stop < record.payload_bytes):
            raise ProtocolError(
                f"{message.payload_bytes} bytes of {record.payload_bytes} from {share.start} on"
            )
        reason = f"process {self._me.process} has no room for slots of {owner}"
        try:
            ring = self._slots.ring_for(owner)
        except UserError as error:
            ring, reason = None, str(error)
        if ring is None or not ring.shape.has_room_for(record):
            channel.discard(message.payload_bytes, deadline)
            return _refusal(reason)
        with self._arrivals.taking(owner, share.transfer) as intact:
            room = None
            if intact is not None:
                with self._placing:  # parts of a slot come over several connections
                    room = ring.take(record, share.beside)
            if intact is None or room is None:
                channel.discard(message.payload_bytes, deadline)
                return _refusal(reason if intact is not None else "another transfer came since")
            if message.payload_bytes:
                arriving = ArrivingParts(record, share.start)
                channel.receive_into(room[share.start : stop], deadline, arriving.add)
                intact.difference_update(record.names_in(share.start, stop))
                intact.update(arriving.intact)
            if not share.is_last:
                return _Answer(Kind.STORED, {})
            damaged = record.damaged_parts(room, intact)
            if not damaged:
                ring.publish(record)
        if damaged:
            logger.warning("replication: %s of step %d arrived damaged", owner, record.step)
            document = {"reason": f"damaged: {damaged[0]}", "damaged": len(damaged)}
            return _Answer(Kind.REFUSED, document)
        self._slots.stored(key_of(owner, record), record)
        return _Answer(Kind.STORED, {})

    def _learn(self, message: Message) -> _Answer:
        try:
            self._slots.learn(History.of_document(message.document))
        except UserError as error:
            return _refusal(str(error))
        return _Answer(Kind.STORED, {})

    def _give(self, message: Message) -> _Answer:
        """Gives bytes of a slot that is intact; who asked checks what arrives."""
        key, wanted = range_of_document(message.document)
        found = self._slots.find(key)
        if found is None:
            return _refusal(
                f"process {self._me.process} does not hold slot {key.slot} of {key.owner}"
            )
        ring, record = found
        # Who asks for the rest asks for the first bytes, too: all of it is read once.
        if wanted.start < 1 <= wanted.stop and (damaged := ring.damaged_parts(record)):
            return _refusal(f"process {self._me.process} has it damaged: {damaged[0]}")
        payload = ring.payload(record)[wanted] or None
        return _Answer(Kind.FOUND, slot_document(key.owner, record), payload)

    def _give_logged(self, message: Message) -> _Answer:
        """Gives a tensor of the upstream log out of its memory; who asked checks what arrives."""
        tag = tag_of_document(message.document)
        try:
            if self._log is None:
                raise LookupError(f"process {self._me.process} keeps no upstream log")
            tensor, logged_hash = self._log.serve(tag), self._log.logged_hash(tag)
        except (LookupError, RuntimeError) as error:
            return _refusal(str(error))
        header = TensorHeader(tensor.dtype, tuple(tensor.shape), logged_hash)
        return _Answer(Kind.LOGGED, header.document(), tensor_bytes(tensor))

    def _give_hashes(self, message: Message) -> _Answer:
        step = step_of_document(message.document)
        if self._log is None:
            return _refusal(f"process {self._me.process} keeps no upstream log")
        return _Answer(Kind.HASHES, hashes_document(self._log.received(step)))

    def _give_state(self, message: Message) -> _Answer:
        """Gives bytes of the live state; their checksum is made of what was read."""
        wanted, state = StateRange.of_document(message.document), self._state
        try:
            if state is None:
                raise LookupError(f"process {self._me.process} offers no state")
            payload, part_bytes = state.read(wanted.step, wanted.part, wanted.bytes)
        except LookupError as error:
            return _refusal(str(error))
        document = found_document(wanted, part_bytes, checksum_of(payload))
        return _Answer(Kind.STATE_PART, document, payload)


@dataclasses.dataclass(frozen=True)
class _Answer:
    kind: Kind
    document: Mapping[str, Any]
    payload: memoryview | None = None


def _refusal(reason: str) -> _Answer:
    return _Answer(Kind.REFUSED, {"reason": reason})
