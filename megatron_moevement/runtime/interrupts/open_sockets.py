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
_SLICE_S = 1.0
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
    for descriptor, name in _sockets():
        if name in kept:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in {socket.AF_INET, socket.AF_INET6}:
                continue
            if connection.type != socket.SOCK_STREAM:
                continue
            own, peer = connection.getsockname()[1], connection.getpeername()[1]
            if {own, peer} & kept_ports or (only_ports is not None and peer not in only_ports):
                continue
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def bound_silence(port: int, limit: timedelta) -> None:
    """Breaks connections to a port whose machine says nothing for a time: it is gone.

    A machine that is there answers for its processes, however slow they are.
    """
    seconds = max(int(limit.total_seconds()), 1)
    for descriptor, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in {socket.AF_INET, socket.AF_INET6}:
                continue
            if connection.getpeername()[1] != port:
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, max(seconds // 2, 1)),
                (socket.TCP_KEEPINTVL, max(seconds // _PROBES, 1)),
                (socket.TCP_USER_TIMEOUT, seconds * 1000),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def await_listener(host: str, port: int, patience: timedelta) -> None:
    """Returns when something listens at an address, or when the patience is over.

    torch's own wait for it is in native code, where no interrupt arrives.
    """
    deadline_s = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline_s:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), timeout=_SLICE_S),
        ):
            return
        time.sleep(_PAUSE_S)


def _sockets() -> Iterator[tuple[int, str]]:
    for number in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(_DESCRIPTORS / number)
            if name.startswith("socket:"):
                yield int(number), name
