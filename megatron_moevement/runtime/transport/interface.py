"""The interface that a process receives copies on, and what tells machines apart."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

from megatron_moevement.errors import UserError

_BACKLOG = 128
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def own_network() -> str:
    """Returns a name of the loopback interface of this process, unlike that of any other one.

    The boot of the kernel tells machines apart even where they have the same host name or were
    cloned from one image, and is the same for all virtual nodes of a machine. Containers of one
    kernel may have a loopback interface each: they differ by their network namespace.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {os.readlink(_NETWORK)}"
    except OSError:  # no Linux, or no /proc
        return socket.gethostname()


def own_address(interface: str) -> str:
    """Returns the IP address of an interface.

    Raises:
        UserError: it is none of this machine's, or all of them.
    """
    with listen_on(interface) as listener:
        return str(listener.getsockname()[0])


def listen_on(interface: str) -> socket.socket:
    """Returns a socket that listens on a free port of an interface.

    Args:
        interface: host name or IP address of this machine, `--moevement-replication-interface`.

    Raises:
        UserError: it is none of this machine's, or all of them.
    """
    place = f"--moevement-replication-interface {interface}"
    try:
        found = socket.getaddrinfo(interface, 0, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        if ipaddress.ip_address(address[0]).is_unspecified:
            raise UserError(f"{place} is every interface; give the address of one")
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"{place} can't be resolved: {error.strerror or error}") from error
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{place} is no address of this machine that can be listened on: "
            f"{error.strerror or error}"
        ) from error
    return listener
