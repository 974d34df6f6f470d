# SPDX-License-Identifier: Apache-2.0
"""What every transport does: the tests of one are a class that inherits these."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from random import Random

import pytest

from megatron_moevement.runtime.transport.transport import Connection, Deadline, Transport

INTERFACE = "127.0.0.1"
_LIMIT = timedelta(seconds=20)
_SHORT = timedelta(milliseconds=100)
_LARGE_BYTES = 24 * 2**20
"""More than a transport keeps of what nobody receives."""

Ends = tuple[Connection, Connection]


def soon() -> Deadline:
    """Returns a deadline that is met where nothing is wrong."""
    return Deadline(_LIMIT)


def received(connection: Connection, size_bytes: int) -> bytes:
    """Returns the bytes that come next."""
    target = memoryview(bytearray(size_bytes))
    left = target
    while left.nbytes:
        count = connection.receive_into(left, soon())
        assert 1 <= count <= left.nbytes
        left = left[count:]
    return target.tobytes()


def beside(work: Callable[[], object]) -> Future[object]:
    """Does something on a thread of its own."""
    outcome: Future[object] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  (looked at by who waits)
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def failure(outcome: Future[object]) -> BaseException | None:
    """Returns what something that was done beside ended with."""
    return outcome.exception(_LIMIT.total_seconds())


def _send_all(connection: Connection, pieces: list[bytes]) -> None:
    for piece in pieces:
        connection.send(piece, soon())


class TransportContract:
    """Tests of a transport; who inherits them gives the fixture `transport`."""

    @pytest.fixture
    def ends(self, transport: Transport) -> Iterator[Ends]:
        """Returns the two ends of a connection."""
        listener = transport.listen(INTERFACE)
        with contextlib.closing(listener):
            dialed = transport.dial(listener.address, soon())
            accepted, _ = listener.accept()
            with contextlib.closing(dialed), contextlib.closing(accepted):
                yield dialed, accepted

    def test_bytes_arrive_whole_and_in_order_both_ways(self, ends: Ends) -> None:
        """However they are cut where they are sent and received."""
        random = Random(1)  # noqa: S311  (no secret)
        for sender, receiver in (ends, ends[::-1]):
            pieces = [random.randbytes(random.randrange(1, 3000)) for _ in range(50)]
            sent = beside(functools.partial(_send_all, sender, pieces))
            data = b"".join(pieces)
            while data:
                size_bytes = min(random.randrange(1, 5000), len(data))
                assert received(receiver, size_bytes) == data[:size_bytes]
                data = data[size_bytes:]
            assert failure(sent) is None

    def test_a_large_payload_arrives_in_the_memory_it_is_for(self, ends: Ends) -> None:
        """Out of memory, and into the middle of memory, of which nothing else changes."""
        payload = memoryview(bytes(range(250)) * (_LARGE_BYTES // 250))
        memory = memoryview(bytearray(payload.nbytes + 200))
        target = memory[100:-100]
        sent = beside(lambda: ends[0].send(payload, soon()))
        while target.nbytes:
            target = target[ends[1].receive_into(target, soon()) :]
        assert failure(sent) is None
        assert memory[100:-100] == payload
        assert memory[:100].tobytes() + memory[-100:].tobytes() == bytes(200)

    def test_who_is_sent_nothing_in_time_has_lost_nothing(self, ends: Ends) -> None:
        """A deadline is a TimeoutError, and what comes after it arrives."""
        target = memoryview(bytearray(5))
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            ends[1].receive_into(target, Deadline(_SHORT))
        assert time.monotonic() - began_s >= _SHORT.total_seconds()
        ends[0].send(b"later", soon())
        assert received(ends[1], 5) == b"later"

    def test_who_sends_more_than_is_received_in_time_stops(self, ends: Ends) -> None:
        """A peer that does not read holds nobody up for longer than the deadline."""
        with pytest.raises(TimeoutError):
            ends[0].send(memoryview(bytes(_LARGE_BYTES)), Deadline(_SHORT))

    def test_a_deadline_that_has_passed_is_met_by_nothing(
        self, transport: Transport, ends: Ends
    ) -> None:
        """Not even by what could be done at once."""
        passed = Deadline(timedelta(0))
        ends[0].send(b"there", soon())
        with pytest.raises(TimeoutError):
            ends[0].send(b"more", passed)
        with pytest.raises(TimeoutError):
            ends[1].receive_into(memoryview(bytearray(5)), passed)
        with (
            contextlib.closing(transport.listen(INTERFACE)) as listener,
            pytest.raises(TimeoutError),
        ):
            transport.dial(listener.address, passed)

    @pytest.mark.parametrize("ended", ["close", "shut_down"])
    def test_what_was_sent_before_the_end_arrives(self, ends: Ends, ended: str) -> None:
        """And then the end: a ConnectionError for who receives, and soon for who sends."""
        ends[0].send(b"the last", soon())
        getattr(ends[0], ended)()
        assert received(ends[1], 8) == b"the last"
        ends[1].await_bytes()
        for _ in range(2):
            with pytest.raises(ConnectionError):
                ends[1].receive_into(memoryview(bytearray(5)), soon())
        with pytest.raises(ConnectionError):
            ends[1].send(memoryview(bytes(_LARGE_BYTES)), soon())

    @pytest.mark.parametrize("waiting", ["receive", "send", "await_bytes"])
    def test_shutting_down_wakes_who_waits(self, ends: Ends, waiting: str) -> None:
        """Whatever it waits for; at the other end, who receives."""
        waits: dict[str, Callable[[Connection], object]] = {
            "receive": lambda end: received(end, 5),
            "send": lambda end: end.send(memoryview(bytes(_LARGE_BYTES)), soon()),
            "await_bytes": lambda end: end.await_bytes(),
        }
        waiters = ends[:1] if waiting == "send" else ends
        outcomes = [beside(functools.partial(waits[waiting], end)) for end in waiters]
        time.sleep(0.05)
        assert not any(outcome.done() for outcome in outcomes)
        ends[0].shut_down()
        for outcome in outcomes:
            error = failure(outcome)
            assert isinstance(error, ConnectionError) or (
                error is None and waiting == "await_bytes"
            )

    def test_ending_twice_does_nothing(self, ends: Ends) -> None:
        """Nor does shutting down what is closed."""
        for _ in range(2):
            ends[0].shut_down()
            ends[0].close()

    def test_bytes_can_be_awaited_and_are_still_there(self, ends: Ends) -> None:
        """Waiting for them takes nothing away."""
        woken = beside(ends[1].await_bytes)
        ends[0].send(b"hello", soon())
        assert failure(woken) is None
        assert received(ends[1], 5) == b"hello"

    def test_connections_of_one_listener_are_apart(self, transport: Transport) -> None:
        """Each caller reaches an end of its own; the listener says where it is."""
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(contextlib.closing(transport.listen(INTERFACE)))
            callers = []
            for number in range(3):
                dialed = transport.dial(listener.address, soon())
                stack.callback(dialed.close)
                dialed.send(bytes([number]), soon())
                accepted, caller = listener.accept()
                stack.callback(accepted.close)
                callers.append(caller)
                assert received(accepted, 1) == bytes([number])
            assert len(set(callers)) == 3
            assert all(isinstance(host, str) for host, _ in callers)

    def test_listeners_have_addresses_of_their_own(self, transport: Transport) -> None:
        """Several of one interface, each reached at its own."""
        with contextlib.ExitStack() as stack:
            listeners = [transport.listen(INTERFACE) for _ in range(3)]
            for listener in listeners:
                stack.callback(listener.close)
            assert len({listener.address for listener in listeners}) == 3
            dialed = transport.dial(listeners[1].address, soon())
            stack.callback(dialed.close)
            accepted, _ = listeners[1].accept()
            stack.callback(accepted.close)

    def test_nobody_answers_where_nobody_listens(self, transport: Transport) -> None:
        """A call fails at once."""
        listener = transport.listen(INTERFACE)
        listener.shut_down()
        listener.close()
        with pytest.raises(ConnectionError):
            transport.dial(listener.address, soon())

    def test_shutting_a_listener_down_wakes_who_accepts(self, transport: Transport) -> None:
        """With an OSError."""
        with contextlib.closing(transport.listen(INTERFACE)) as listener:
            accepting = beside(listener.accept)
            time.sleep(0.05)
            assert not accepting.done()
            listener.shut_down()
            assert isinstance(failure(accepting), OSError)

    def test_a_call_can_be_ended_before_it_is_answered(self, transport: Transport) -> None:
        """By what is raised while it is opened, and by shutting the connection down."""
        given: list[Connection] = []

        def refuse(connection: Connection) -> None:
            given.append(connection)
            raise ConnectionAbortedError("closed")

        def end(connection: Connection) -> None:
            given.append(connection)
            connection.shut_down()

        with contextlib.closing(transport.listen(INTERFACE)) as listener:
            with pytest.raises(ConnectionAbortedError, match="closed"):
                transport.dial(listener.address, soon(), refuse)
            with pytest.raises(ConnectionError):
                received(transport.dial(listener.address, soon(), end), 1)
        given[1].close()
        assert len(given) == 2
