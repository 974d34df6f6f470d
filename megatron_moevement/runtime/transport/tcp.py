# SPDX-License-Identifier: Apache-2.0
"""TCP: the transport of production."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.transport.transport import Address, Connection, Deadline

_BACKLOG = 128
_SIOCGIFADDR = 0x8915
_MAX_NAME_BYTES = 15


class _Socket:
    def __init__(self, taken: socket.socket) -> None:
        self._socket = taken

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TcpConnection(_Socket):
    """A TCP connection."""

    def __init__(self, taken: socket.socket) -> None:
        super().__init__(taken)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Sends all of the bytes, out of the memory where they are."""
        self._socket.settimeout(deadline.remaining_s())
        self._socket.sendall(data)

    def receive_into(self, target: memoryview, deadline: Deadline) -> int:
        """Fills the beginning of memory with what comes next; returns how many bytes."""
        self._socket.settimeout(deadline.remaining_s())
        received = self._socket.recv_into(target)
        if received == 0:
            raise ConnectionResetError("the peer hung up")
        return received

    def await_bytes(self) -> None:
        """Waits until there is something to receive or the connection ends."""
        self._socket.settimeout(None)
        self._socket.recv(1, socket.MSG_PEEK)


class TcpListener(_Socket):
    """A socket that listens on a free port of one interface."""

    def __init__(self, taken: socket.socket) -> None:
        super().__init__(taken)
        host, port = taken.getsockname()[:2]
        self.address: Address = (host, port)

    def accept(self) -> tuple[TcpConnection, Address]:
        """Waits for a caller; returns the connection, and where the caller is."""
        connection, (host, port, *_) = self._socket.accept()
        return TcpConnection(connection), (host, port)


class Tcp:
    """Connections over TCP."""

    def dial(
        self,
        address: Address,
        deadline: Deadline,
        opened: Callable[[Connection], None] = lambda connection: None,
    ) -> TcpConnection:
        """Connects to a listener."""
        family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        calling = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection = TcpConnection(calling)
            opened(connection)
            calling.settimeout(deadline.remaining_s())
            calling.connect(resolved)
        except BaseException:
            calling.close()
            raise
        return connection

    def listen(self, interface: str) -> TcpListener:
        """Listens on a free port of an interface."""
        place = f"--moevement-replication-interface {interface}"
        try:
            host = _address_of(interface) or interface
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            if ipaddress.ip_address(address[0]).is_unspecified:
                raise UserError(f"{place} is every interface; give the address of one")
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise UserError(f"{place} can't be resolved: {error.strerror or error}") from error
        try:
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            raise UserError(
                f"{place} is no address of this machine that can be listened on: "
                f"{error.strerror or error}"
            ) from error
        return TcpListener(listening)


def _address_of(name: str) -> str | None:
    """Returns the IPv4 address of the network interface of that name, None where there is none."""
    if len(name.encode()) > _MAX_NAME_BYTES:
        return None
    request = struct.pack("16s24x", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


TCP = Tcp()
