# SPDX-License-Identifier: Apache-2.0
"""The TCP connections of this process, looked at from outside of who uses them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_PROBES = 10
_SLICE = timedelta(seconds=1)
_PAUSE_S = 0.05


def connected_sockets() -> frozenset[str]:
    """Returns names of the sockets that are open now."""
    return frozenset(name for _, name in _sockets())


def shut_down_connections(
    kept_ports: frozenset[int], kept: frozenset[str], only_ports: frozenset[int] | None = None
) -> int:
    """Shuts TCP connections down, so that whoever waits in one fails at once; any thread may call.

    They are not closed: a number that is free may be taken by another file at once, and a forked
    child would keep the connection alive.

    Args:
        kept_ports: connections from or to these ports are left alone.
        kept: names of sockets that are left alone.
        only_ports: where given, only connections to these ports are shut down.

    Returns:
        How many were shut down.
    """
    count = 0
    for name, connection, own, peer in _tcp_connections():
        if name in kept or {own, peer} & kept_ports:
            continue
        if only_ports is None or peer in only_ports:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def bound_silence(port: int, limit: timedelta) -> None:
    """Breaks connections to a port whose machine says nothing for a time: it is gone.

    A machine that is there answers for its processes, however slow they are.
    """
    seconds = max(int(limit.total_seconds()), 1)
    limits = {
        socket.TCP_KEEPIDLE: max(seconds // 2, 1),
        socket.TCP_KEEPINTVL: max(seconds // _PROBES, 1),
        socket.TCP_USER_TIMEOUT: seconds * 1000,
    }
    for _, connection, _, peer in _tcp_connections():
        if peer == port:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in limits.items():
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_listening(host: str, port: int, patience: timedelta) -> bool:
    """Returns whether something listens at an address; at once where the machine refuses."""
    try:
        with socket.create_connection((host, port), timeout=patience.total_seconds()):
            return True
    except OSError:
        return False


def await_listener(host: str, port: int, patience: timedelta) -> None:
    """Returns when something listens at an address, or when the patience is over.

    torch's own wait for it is in native code, where no interrupt arrives.
    """
    deadline_s = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline_s:
        if is_listening(host, port, _SLICE):
            return
        time.sleep(_PAUSE_S)


def _tcp_connections() -> Iterator[tuple[str, socket.socket, int, int]]:
    """Yields name, duplicate, own port and peer's port of each TCP connection."""
    for descriptor, name in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            is_internet = found.family in {socket.AF_INET, socket.AF_INET6}
            if is_internet and found.type == socket.SOCK_STREAM:
                yield name, found, found.getsockname()[1], found.getpeername()[1]


def _sockets() -> Iterator[tuple[int, str]]:
    for number in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(_DESCRIPTORS / number)
            if name.startswith("socket:"):
                yield int(number), name
