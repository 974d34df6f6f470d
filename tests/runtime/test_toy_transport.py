# SPDX-License-Identifier: Apache-2.0
"""A transport that is added in one file: pairs of Unix sockets, handed to who listens."""

import contextlib
import itertools
import queue
import socket

import pytest

from megatron_moevement.runtime.transport.handshake import Session, answer_call, call
from megatron_moevement.runtime.transport.wire import Channel, Kind
from tests.harness.transport_contract import INTERFACE, TransportContract, beside, failure, soon

TOKEN = b"a secret of this job"


class ToyConnection:
    def __init__(self, end):
        self._end = end

    def send(self, data, deadline):
        self._end.settimeout(deadline.remaining_s())
        self._end.sendall(data)

    def receive_into(self, target, deadline):
        self._end.settimeout(deadline.remaining_s())
        count = self._end.recv_into(target)
        if count == 0:
            raise ConnectionResetError("the other end is gone")
        return count

    def await_bytes(self):
        self._end.settimeout(None)
        self._end.recv(1, socket.MSG_PEEK)

    def shut_down(self):
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._end.close()


class ToyListener:
    def __init__(self, address, listeners):
        self.address, self._listeners = address, listeners
        self.calls = queue.SimpleQueue()

    def accept(self):
        called = self.calls.get()
        if called is None:
            raise ConnectionAbortedError("shut down")
        return called

    def shut_down(self):
        self._listeners.pop(self.address, None)
        self.calls.put(None)

    def close(self):
        self.shut_down()


class Toy:
    def __init__(self):
        self._numbers, self._listeners = itertools.count(), {}

    def dial(self, address, deadline, opened=lambda connection: None):
        ours, theirs = (ToyConnection(end) for end in socket.socketpair())
        try:
            opened(ours)
            deadline.remaining_s()
            if address not in self._listeners:
                raise ConnectionRefusedError(f"nobody is at {address}")
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._listeners[address].calls.put((theirs, ("toy", next(self._numbers))))
        return ours

    def listen(self, interface):
        address = (interface, next(self._numbers))
        listener = self._listeners[address] = ToyListener(address, self._listeners)
        return listener


class TestToy(TransportContract):
    @pytest.fixture
    def transport(self):
        return Toy()


def test_peers_prove_themselves_and_talk_over_a_toy():
    toy = Toy()
    with contextlib.closing(toy.listen(INTERFACE)) as listener:
        client = Channel(toy.dial(listener.address, soon()))
        server = Channel(listener.accept()[0])
    with client, server:
        callers: list[int] = []
        answered = beside(
            lambda: answer_call(server, Session(TOKEN, 1, 5, toy), soon(), callers.append)
        )
        call(client, Session(TOKEN, 0, 5, toy), 1, soon())
        assert failure(answered) is None
        assert callers == [0]
        client.send(Kind.FETCH, 5, {"key": 1}, None, soon())
        assert server.receive(soon()).document == {"key": 1}
