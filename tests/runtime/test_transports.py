# SPDX-License-Identifier: Apache-2.0
"""Each transport passes the tests of the contract; TCP listens where it is told."""

import contextlib
import time
import types
from datetime import timedelta

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.transport import transport as transport_module
from megatron_moevement.runtime.transport.tcp import TCP
from megatron_moevement.runtime.transport.transport import Deadline
from tests.harness.loopback_transport import Link, Loopback
from tests.harness.transport_contract import TransportContract, received, soon


class TestTcp(TransportContract):
    @pytest.fixture
    def transport(self):
        return TCP

    def test_it_listens_on_the_interface_that_is_named_and_on_no_other_one(self):
        with contextlib.closing(TCP.listen("127.0.0.2")) as listener:
            host, port = listener.address
            assert host == "127.0.0.2"
            with pytest.raises(ConnectionRefusedError):
                TCP.dial(("127.0.0.1", port), soon())
            TCP.dial(listener.address, soon()).close()

    def test_it_listens_at_the_address_of_an_interface_that_is_named(self):
        with contextlib.closing(TCP.listen("lo")) as listener:
            assert listener.address[0] == "127.0.0.1"

    @pytest.mark.parametrize(
        "interface",
        ["0.0.0.0", "::", "203.0.113.7", "no-such-host.invalid", "lo-is-no-prefix-of-it"],
    )
    def test_it_listens_on_one_interface_of_this_machine_only(self, interface):
        with pytest.raises(UserError, match="--moevement-replication-interface"):
            TCP.listen(interface)


class TestPerfectLoopback(TransportContract):
    @pytest.fixture
    def transport(self):
        return Loopback()


BAD = Link(bandwidth_bytes_per_s=500e6, latency=timedelta(milliseconds=0.5), loss=0.05, seed=7)


class TestBadLoopback(TransportContract):
    @pytest.fixture
    def transport(self):
        return Loopback(BAD)


@pytest.fixture
def clock(monkeypatch):
    """Stands still; the test moves it."""
    now = types.SimpleNamespace(s=100.0)
    monkeypatch.setattr(transport_module.time, "monotonic", lambda: now.s)
    return now


def test_what_moves_on_has_the_time_that_its_size_needs(clock):
    deadline = Deadline(timedelta(seconds=30))
    for _ in range(100):
        clock.s += 10
        deadline.carried(20 * 10**6)
    assert deadline.since_s == clock.s == 1100
    assert deadline.remaining_s() == 30
    clock.s += 30
    with pytest.raises(TimeoutError):
        deadline.remaining_s()


def test_a_peer_that_drips_is_given_up(clock):
    deadline = Deadline(timedelta(seconds=30))
    for _ in range(29):
        clock.s += 1
        deadline.carried(10)
    clock.s += 1.1
    with pytest.raises(TimeoutError):
        deadline.remaining_s()


def carried(link, size_bytes):
    """Sends bytes over a link; returns how long it took in seconds, and what was lost."""
    loopback = Loopback(link)
    with contextlib.closing(loopback.listen("127.0.0.1")) as listener:
        dialed = loopback.dial(listener.address, soon())
        accepted, _ = listener.accept()
        began_s = time.monotonic()
        dialed.send(bytes(size_bytes), soon())
        received(accepted, size_bytes)
        return time.monotonic() - began_s, loopback.lost


def test_a_loopback_is_as_slow_as_its_link():
    assert carried(Link(latency=timedelta(seconds=0.1)), 1)[0] >= 0.1
    assert carried(Link(bandwidth_bytes_per_s=1e6), 200_000)[0] >= 0.2


def test_what_a_loopback_loses_is_drawn_from_the_seed_and_costs_round_trips():
    latency = timedelta(milliseconds=20)
    took_s, lost = carried(Link(latency=latency, loss=0.5, seed=3), 16 * 2**14)
    assert lost > 0
    assert took_s >= 3 * latency.total_seconds()
    assert carried(Link(loss=0.5, seed=3), 16 * 2**14)[1] == lost
    assert len({carried(Link(loss=0.5, seed=seed), 16 * 2**14)[1] for seed in range(8)}) > 1
