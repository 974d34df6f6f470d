# SPDX-License-Identifier: Apache-2.0
"""A peer whose machine is gone is noticed, a slow one is waited for, and so is one yet to come."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest

from megatron_moevement.runtime.interrupts.open_sockets import await_listener

IN_A_NETWORK_OF_ITS_OWN = ("unshare", "--net")
CONNECTED = """
import errno, socket, subprocess, sys
from datetime import timedelta
from megatron_moevement.runtime.interrupts.open_sockets import bound_silence

def set_link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

set_link("up")
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
client.settimeout(3)
bound_silence(server.getsockname()[1], timedelta(seconds=1))
set_link(sys.argv[1])
try:
    client.recv(1)
except TimeoutError as error:
    print("gone" if error.errno == errno.ETIMEDOUT else "slow")
"""


def has_networks():
    """Returns whether this process may make a network of its own."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*IN_A_NETWORK_OF_ITS_OWN, "true"], check=False).returncode == 0


@pytest.mark.skipif(not has_networks(), reason="needs the right to make a network")
@pytest.mark.parametrize(
    ("link", "found"), [pytest.param("up", "slow", marks=pytest.mark.slow), ("down", "gone")]
)
def test_a_machine_that_is_gone_is_told_from_a_slow_peer(link, found):
    command = [*IN_A_NETWORK_OF_ITS_OWN, sys.executable, "-c", CONNECTED, link]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_who_listens_later_is_waited_for():
    port = free_port()
    waiting = threading.Thread(
        target=await_listener, args=("127.0.0.1", port, timedelta(minutes=10))
    )
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(60)
    assert not waiting.is_alive()


def test_who_never_listens_is_waited_for_until_the_patience_is_over():
    await_listener("127.0.0.1", free_port(), timedelta(seconds=0.1))


def test_an_interrupt_reaches_who_waits():
    patience = timedelta(minutes=10)

    def interrupt(*_):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    began_s = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with contextlib.suppress(InterruptedError):
            await_listener("127.0.0.1", free_port(), patience)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began_s < patience.total_seconds()
