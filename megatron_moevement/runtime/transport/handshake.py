# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end: both sides prove that they know the job's token, without telling it.

Each sends a random challenge; the answer is an HMAC-SHA256 over both challenges, both process
numbers, both generations and the role, so that no answer fits anywhere else. The keys that prove
all messages after it are made in the same way. What follows is not encrypted: the interface is the
job's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.commit import is_current
from megatron_moevement.runtime.transport.tcp import TCP
from megatron_moevement.runtime.transport.transport import Deadline, Transport
from megatron_moevement.runtime.transport.wire import Channel, Kind, Message, ProtocolError

_CHALLENGE_BYTES = 32
_MAX_DOCUMENT_BYTES = 1024
"""Of somebody who has not yet proved anything."""
_MIN_TOKEN_BYTES = 16
_PURPOSE = b"megatron-moevement replication 3"


class RefusedError(MoEvementError):
    """The peer is of this job and refuses, for the reason that it gives."""


@dataclasses.dataclass(frozen=True)
class Session:
    """Who a process is to its peers.

    Attributes:
        generation: in which it lives; messages of another one are refused.

    Raises:
        ValueError: the token is too short to be a secret.
    """

    token: bytes = dataclasses.field(repr=False)
    process: int
    generation: int
    transport: Transport = TCP

    def __post_init__(self) -> None:
        if len(self.token) < _MIN_TOKEN_BYTES:
            raise ValueError(f"a job token of less than {_MIN_TOKEN_BYTES} bytes")


@dataclasses.dataclass(frozen=True)
class _Parties:
    client: int
    client_generation: int
    client_challenge: bytes
    server: int
    server_generation: int
    server_challenge: bytes

    def proof(self, role: bytes, token: bytes) -> str:
        return self._key(role, token).hex()

    def message_keys(self, token: bytes) -> tuple[bytes, bytes]:
        """Returns the keys of what the client sends, and of what the server sends."""
        return self._key(b"from client", token), self._key(b"from server", token)

    def _key(self, role: bytes, token: bytes) -> bytes:
        numbers = (self.client, self.client_generation, self.server, self.server_generation)
        text = b"\0".join(
            (_PURPOSE, role, self.client_challenge + self.server_challenge)
        ) + struct.pack("<4Q", *numbers)
        return hmac.new(token, text, hashlib.sha256).digest()

    def check(self, role: bytes, token: bytes, proof: object) -> None:
        if not isinstance(proof, str) or not hmac.compare_digest(
            self.proof(role, token).encode(), proof.encode(errors="replace")
        ):
            raise ProtocolError("the peer does not have the job's token")


def call(channel: Channel, me: Session, process: int, deadline: Deadline) -> None:
    """Greets a server and makes sure that it is a process of this job.

    Args:
        process: who is expected at the other end.

    Raises:
        ProtocolError: it is not that process, or not of this job.
        RefusedError: it lives in another generation.
        OSError: the connection broke, or nothing came in time.
    """
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    hello = {"process": me.process, "challenge": challenge.hex()}
    channel.send(Kind.HELLO, me.generation, hello, None, deadline)
    answer = _expect(channel, Kind.CHALLENGE, deadline)
    if (server := _number(answer)) != process:
        raise ProtocolError(f"process {server} answers for process {process}")
    parties = _Parties(
        me.process, me.generation, challenge, server, answer.generation, _challenge(answer)
    )
    parties.check(b"server", me.token, answer.document.get("proof"))
    proof = {"proof": parties.proof(b"client", me.token)}
    channel.send(Kind.PROOF, me.generation, proof, None, deadline)
    channel.secure(*parties.message_keys(me.token))
    _expect(channel, Kind.WELCOME, deadline)


def answer_call(
    channel: Channel,
    me: Session,
    deadline: Deadline,
    admit: Callable[[int], None] = lambda process: None,
) -> None:
    """Lets a caller prove that it is a process of this job and generation.

    Args:
        admit: called with its number when it has proved that, before it learns of it: what it sends
            then must not come to one that takes it for a stranger. What it raises ends the call.

    Raises:
        ProtocolError: it does not prove it.
        RefusedError: it lives in another generation.
        OSError: the connection broke, or nothing came in time.
    """
    hello = _expect(channel, Kind.HELLO, deadline)
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    parties = _Parties(
        _number(hello), hello.generation, _challenge(hello), me.process, me.generation, challenge
    )
    own = {
        "process": me.process,
        "challenge": challenge.hex(),
        "proof": parties.proof(b"server", me.token),
    }
    channel.send(Kind.CHALLENGE, me.generation, own, None, deadline)
    answer = _expect(channel, Kind.PROOF, deadline)
    parties.check(b"client", me.token, answer.document.get("proof"))
    from_client, from_server = parties.message_keys(me.token)
    channel.secure(from_server, from_client)
    if not is_current(hello.generation, me.generation):
        reason = f"a caller of generation {hello.generation} in generation {me.generation}"
        channel.send(Kind.REFUSED, me.generation, {"reason": reason}, None, deadline)
        raise RefusedError(reason)
    admit(parties.client)
    channel.send(Kind.WELCOME, me.generation, {}, None, deadline)


def _expect(channel: Channel, kind: Kind, deadline: Deadline) -> Message:
    message = channel.receive(deadline, _MAX_DOCUMENT_BYTES)
    if message.kind is Kind.REFUSED and kind is Kind.WELCOME:
        raise RefusedError(str(message.document.get("reason")))
    if message.kind is not kind or message.payload_bytes:
        raise ProtocolError(f"{message.kind.name} where {kind.name} was expected")
    return message


def _number(message: Message) -> int:
    number = message.document.get("process")
    if type(number) is not int or not 0 <= number < 2**63:
        raise ProtocolError(f"no process number: {number!r}")
    return number


def _challenge(message: Message) -> bytes:
    try:
        challenge = bytes.fromhex(message.document["challenge"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("no challenge") from error
    if len(challenge) != _CHALLENGE_BYTES:
        raise ProtocolError(f"a challenge of {len(challenge)} bytes")
    return challenge
