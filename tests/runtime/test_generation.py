# SPDX-License-Identifier: Apache-2.0
"""A generation closes what was opened in it, and a restart shuts connections down, not others'."""

import contextlib
import socket

import pytest

from megatron_moevement.policy.recovery.lifecycle import Event, IllegalEventError, Phase
from megatron_moevement.runtime.coordination.generation import (
    Generation,
    InterruptedGenerationError,
)
from megatron_moevement.runtime.interrupts.open_sockets import (
    connected_sockets,
    shut_down_connections,
)


class Opened:
    def __init__(self, name, closed):
        self.name, self.closed = name, closed

    def close(self):
        self.closed.append(self.name)


def test_what_was_opened_last_is_closed_first_and_once():
    closed = []
    generation = Generation(3)
    for name in "ab":
        generation.own(lambda name=name: Opened(name, closed))
    generation.close()
    generation.close()
    assert closed == ["b", "a"]


def test_opening_is_not_interrupted():
    entered = []

    @contextlib.contextmanager
    def section():
        entered.append("in")
        yield
        entered.append("out")

    Generation(0, section).own(lambda: entered.append("opening"))
    assert entered == ["in", "opening", "out"]


def test_the_watchdog_rests_and_an_observer_sees_each_phase():
    calls, seen = [], []
    generation = Generation(1, rest=lambda: calls.append(generation.phase))
    generation.observe(seen.append)
    for event in (Event.LOADS, Event.BEGINS, Event.PAUSES, Event.BEGINS, Event.ENDS):
        generation.advance(event)
    steps = [Phase.TRAINING, Phase.TRAINING]
    assert seen == [Phase.LOADING, steps[0], Phase.PAUSED, steps[1], Phase.ENDING]
    assert calls == [Phase.LOADING, Phase.PAUSED, Phase.ENDING]


def test_a_phase_that_can_not_follow_is_refused_and_leaves_everything_as_it_is():
    generation = Generation(1)
    with pytest.raises(IllegalEventError, match="SETTLED can't happen while a process is planning"):
        generation.advance(Event.SETTLED)
    assert generation.phase is Phase.PLANNING


def connection():
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def test_connections_are_shut_down_but_for_those_that_are_kept():
    with contextlib.ExitStack() as stack:
        former = [stack.enter_context(one) for one in connection()]
        known = connected_sockets()
        control = [stack.enter_context(one) for one in connection()]
        others = [stack.enter_context(one) for one in connection()]
        kept_ports = frozenset({control[0].getsockname()[1]})
        assert shut_down_connections(kept_ports, known) == 2
        assert others[1].recv(1) == b""
        for _, client, server in (former, control):
            client.sendall(b"x")
            assert server.recv(1) == b"x"
        # A listening socket is no connection.
        stack.enter_context(socket.create_connection(others[0].getsockname()))


def test_only_connections_to_some_ports_are_shut_down():
    with contextlib.ExitStack() as stack:
        one = [stack.enter_context(each) for each in connection()]
        other = [stack.enter_context(each) for each in connection()]
        known = frozenset()
        port = frozenset({one[0].getsockname()[1]})
        assert shut_down_connections(frozenset(), known, port) == 1
        assert one[2].recv(1) == b""
        other[1].sendall(b"x")
        assert other[2].recv(1) == b"x"


def test_a_generation_that_fails_closes_too():
    closed = []

    def fail():
        with Generation() as generation:
            generation.own(lambda: Opened("a", closed))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert closed == ["a"]


def test_what_may_have_been_aborted_confirms_nothing():
    Generation().confirm()
    with pytest.raises(InterruptedGenerationError):
        Generation(is_interrupted=lambda: True).confirm()
