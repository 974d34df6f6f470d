# SPDX-License-Identifier: Apache-2.0
"""Who sits between peers of the job cannot alter, leave out or repeat what they say."""

import struct
import threading
from datetime import timedelta
from unittest import mock

import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from megatron_moevement.runtime.transport.handshake import answer_call, call
from megatron_moevement.runtime.transport.transport import Deadline
from megatron_moevement.runtime.transport.wire import Channel, Kind, ProtocolError
from tests.harness.loopback_transport import Loopback

from .conftest import DEADLINE, HEADER


def connected(owner, holder):
    """Returns the two ends of a connection after the proofs."""
    loopback = Loopback()
    listener = loopback.listen("127.0.0.1")
    ours = loopback.dial(listener.address, Deadline(DEADLINE))
    ends = [Channel(ours), Channel(listener.accept()[0])]
    answers = threading.Thread(target=answer_call, args=(ends[1], holder.me, Deadline(DEADLINE)))
    answers.start()
    call(ends[0], owner.me, 1, Deadline(DEADLINE))
    answers.join()
    return ends


PAYLOAD = memoryview(bytes(range(200)) * 10)
_TAG_BYTES = 16


def sent_by(end):
    """Returns the bytes of a message with a payload that an end sends next."""
    heard = bytearray()
    with mock.patch.object(end._connection, "send", lambda data, deadline: heard.extend(data)):
        end.send(Kind.FOUND, 5, {"key": 1}, PAYLOAD, Deadline(DEADLINE))
    return bytes(heard)


def received_by(end, peer, data):
    peer._connection.send(data, Deadline(DEADLINE))
    message = end.receive(Deadline(timedelta(seconds=0.3)))
    into = bytearray(message.payload_bytes)
    end.receive_into(memoryview(into), Deadline(timedelta(seconds=0.3)))
    return bytes(into)


def mended(data):
    """Returns a message whose checksum without a key fits its altered document."""
    length = HEADER.unpack_from(data)[3]
    start, text = data[: HEADER.size], data[HEADER.size + 8 :][:length].replace(b"1", b"2")
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(start + text))
    return start + checksum + text + data[HEADER.size + 8 + length :]


def tagged_by(data, secret):
    """Returns a message whose payload is altered, and tagged by what travels with it."""
    start = len(data) - _TAG_BYTES - len(PAYLOAD)
    payload = b"x" + data[start + 1 : -_TAG_BYTES]
    tagging = Cipher(AES(data[:start][secret]), GCM(bytes(12))).encryptor()
    tagging.authenticate_additional_data(payload)
    tagging.finalize()
    return data[:start] + payload + tagging.tag


FORGED = {
    "a payload that is tagged by the proof": lambda one, two, back: tagged_by(
        one, slice(-32, None)
    ),
    "a payload that is tagged by the header": lambda one, two, back: tagged_by(one, slice(0, 32)),
    "a message that was altered": lambda one, two, back: mended(one),
    "a payload that was altered": lambda one, two, back: one[:-40] + b"x" + one[-39:],
    "a message that was left out": lambda one, two, back: two,
    "a message that was sent back": lambda one, two, back: back,
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_who_sits_between_peers_cannot_alter_what_they_say(job, forge):
    client, server = connected(*job(2))
    with client, server:
        forged = forge(sent_by(server), sent_by(server), sent_by(client))
        with pytest.raises(ProtocolError, match="not what the peer sent"):
            received_by(client, server, forged)


def test_what_peers_say_arrives_once(job):
    client, server = connected(*job(2))
    with client, server:
        first = sent_by(server)
        assert received_by(client, server, first) == bytes(PAYLOAD)
        assert received_by(client, server, sent_by(server)) == bytes(PAYLOAD)
        with pytest.raises(ProtocolError, match="not what the peer sent"):
            received_by(client, server, first)


def test_no_two_payloads_are_proved_by_one_key(job):
    client, server = connected(*job(2))
    with client, server:
        tags = {sent_by(end)[-_TAG_BYTES:] for end in (client, server) for _ in range(3)}
    assert len(tags) == 6, "of the same message and payload each"
