# SPDX-License-Identifier: Apache-2.0
"""The training program on a network that can be parted: `--parted=FOLDER:ONE:OTHER`.

While the file `parted` lies in the folder, nothing arrives of what two processes send each other:
the kernel drops it, over connections that are there and over new ones. Both live, and reach
everybody else and the stores.
"""

import contextlib
import ctypes
import os
import struct
import sys
import threading
import time
from pathlib import Path

from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main

PREFIX = "--parted="
POLL_S = 0.005
SOL_SOCKET, SO_ATTACH_FILTER, SO_DETACH_FILTER = 1, 26, 27
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: return 0 bytes."""


def socket_inodes(process):
    """Returns the sockets of a process: inode and descriptor."""
    found = {}
    folder = Path(f"/proc/{process}/fd")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(folder / name)
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found


def connections():
    """Returns both addresses of each TCP socket by its inode, as the kernel writes them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[9]): (row[1], row[2]) for row in rows}


def between(peer):
    """Returns the descriptors here of connections with another process."""
    known, theirs = connections(), socket_inodes(peer)
    addresses = {known[inode][0] for inode in theirs if inode in known}
    mine = socket_inodes("self")
    return {fd for inode, fd in mine.items() if inode in known and known[inode][1] in addresses}


class Parting(threading.Thread):
    """Drops what comes from a peer while a file is there."""

    def __init__(self, folder, me, peer):
        super().__init__(name="parting", daemon=True)
        self._file = folder / "parted"
        self._peer = folder / f"{peer}.pid"
        self._libc = ctypes.CDLL(None)
        self._filter = ctypes.create_string_buffer(DROP_ALL)
        address = ctypes.addressof(self._filter)
        self._program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, address))
        (folder / f"{me}.pid").write_text(str(os.getpid()))

    def run(self):
        dropped = set()
        while True:
            time.sleep(POLL_S)
            if self._file.exists():
                dropped |= self._drop(between(int(self._peer.read_text())))
            elif dropped:
                self._let_through()
                dropped = set()

    def _drop(self, descriptors):
        for fd in descriptors:
            self._libc.setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, self._program, 16)
        return descriptors

    def _let_through(self):
        for fd in socket_inodes("self").values():
            self._libc.setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, self._program, 4)


def note_generations(folder):
    """Lets a file `generation-N` tell that a process begins a generation."""
    enter = FaultPoints.enter

    def enter_and_note(self, generation):
        (folder / f"generation-{generation}").touch()
        enter(self, generation)

    FaultPoints.enter = enter_and_note


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv if argument.startswith(PREFIX)]
    folder, *pair = given.removeprefix(PREFIX).split(":")
    process = str(Launch.from_environment().process)
    if process in pair:
        pair.remove(process)
        note_generations(Path(folder))
        Parting(Path(folder), process, *pair).start()
    sys.exit(main([argument for argument in sys.argv[1:] if argument != given]))
