# SPDX-License-Identifier: Apache-2.0
"""The lock on the store of one process: two jobs never write the same files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.closing import Closing

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NOTE_BYTES = 1000
# struct flock: type, whence, start, length (0: all of the file), pid; padded to its end.
_STRUCT_FLOCK = struct.Struct("@hhqqi0q")
_WHOLE_FILE_EXCLUSIVELY = _STRUCT_FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class StoreLockedError(UserError):
    """A live process has the store open.

    Attributes:
        owner: what that process says of itself; nothing when it is just opening it.
    """

    def __init__(self, path: Path, owner: Mapping[str, Any]) -> None:
        who = f"process {owner['pid']} of {owner['host']}" if owner else "another process"
        super().__init__(
            f"{path.parent} is in use by {who}; end that job, or give another "
            "--moevement-store-dir or another run id"
        )
        self.owner = owner


class StoreLock(Closing):
    """An exclusive lock on a file, held until it is closed or its process ends.

    The lock belongs to an open file (an open file description lock of Linux), which a forked child
    would inherit and keep after its parent was killed; so children close it.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock.

        Raises:
            StoreLockedError: another process has it.
            FileNotFoundError: the folder is gone.
        """
        self.path = path
        self._descriptor: int | None = _locked(path)
        try:
            note = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
            os.pwrite(self._descriptor, note, 0)
            os.ftruncate(self._descriptor, len(note))
            _HELD.add(self)
        except BaseException:  # an interrupt, too: a lock that nobody knows is held for ever
            self.close()
            raise

    def close(self) -> None:
        """Gives the lock back."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def lock_owner(path: Path) -> Mapping[str, Any] | None:
    """Returns who has a lock, None when nobody has it.

    It asks and takes nothing, not for a moment: who takes the lock meanwhile never finds it held.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE_EXCLUSIVELY)
        is_free = _STRUCT_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK
        return None if is_free else _note(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Returns the descriptor of the locked file, which who held it before may just remove."""
    while True:
        descriptor = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE_EXCLUSIVELY)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False)):
                    kept, descriptor = descriptor, -1
                    return kept
        except BlockingIOError as error:
            raise StoreLockedError(path, _note(descriptor)) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _note(descriptor: int) -> dict[str, Any]:
    try:
        note: dict[str, Any] = json.loads(os.pread(descriptor, _MAX_NOTE_BYTES, 0))
        return {"pid": note["pid"], "host": note["host"]}
    except (ValueError, KeyError, TypeError):
        return {}


_HELD: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_HELD):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
