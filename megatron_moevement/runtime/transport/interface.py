# SPDX-License-Identifier: Apache-2.0
"""The interface that a process receives copies on, and what tells machines apart."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from megatron_moevement.runtime.transport.tcp import TCP

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
    """Returns the IP address of an interface, given by its name or an address.

    Raises:
        UserError: it is none of this machine's, or all of them.
    """
    with contextlib.closing(TCP.listen(interface)) as listener:
        return listener.address[0]
