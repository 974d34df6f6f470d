# SPDX-License-Identifier: Apache-2.0
"""Whether this process's machine still serves it: memory, the store, the folder of checkpoints.

A process whose machine doesn't had better end before it joins a generation: a spare elsewhere takes
its place. What all machines would find alike, such as a full file system of checkpoints, says
nothing of this one and ends nobody.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import secrets
import socket
from pathlib import Path

from megatron_moevement.errors import MoEvementError
from megatron_moevement.runtime.slots.available_memory import available_memory_bytes

_LEAST_MEMORY_BYTES = 64 << 20
"""With less the kernel is about to kill processes."""


class UnhealthyError(MoEvementError):
    """This process can't go on; the message says what it lacks."""


@dataclasses.dataclass(frozen=True)
class HostHealth:
    """What a process needs of its machine.

    Attributes:
        store: the folder of this process's snapshots; None where it has none yet.
        root: the store directory, which may have to be made; None where none is wanted.
        save: the folder of durable checkpoints, which may have to be made.
    """

    store: Path | None
    root: Path | None
    save: Path | None
    least_memory_bytes: int = _LEAST_MEMORY_BYTES

    def check(self) -> None:
        """Looks at all of it; any thread may call.

        Raises:
            UnhealthyError: something is missing.
        """
        available_bytes = available_memory_bytes()
        if available_bytes < self.least_memory_bytes:
            raise UnhealthyError(f"only {available_bytes >> 20} MiB of memory are available")
        page = b"\0" * mmap.PAGESIZE
        if self.store is not None:
            _probe("its store", self.store, page)
        elif self.root is not None:
            _probe("--moevement-store-dir", _nearest(self.root), page)
        if self.save is not None:
            _probe("--save", _nearest(self.save), b"")


def _nearest(folder: Path) -> Path:
    """Returns a folder, or the one above in which it is going to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _probe(name: str, folder: Path, content: bytes) -> None:
    """Writes and removes a small file; an empty one says nothing of the room that is left."""
    probe = folder / f".health-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with probe.open("xb") as file:  # follows no link
            file.write(content)
        probe.unlink()
    except OSError as error:
        if error.errno == errno.ENOSPC and not content:
            return
        raise UnhealthyError(f"{name} {folder} can't be written: {error.strerror}") from error
