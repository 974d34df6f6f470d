# SPDX-License-Identifier: Apache-2.0
"""A file in memory without a name: there, and pinned, before it is known whose it will be."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.closing import Closing

logger = logging.getLogger(__name__)


class LatePin:
    """Makes memory a target of asynchronous copies, on a thread of its own.

    It takes seconds for each ten gigabytes, which nobody waits for so.
    """

    def __init__(self, pin: Callable[[memoryview], Callable[[], None]], memory: memoryview) -> None:
        """Begins; where the system does not let so much memory be locked, it stays as it is.

        Args:
            pin: makes memory such a target; returns what undoes it.
        """
        self._unpin: Callable[[], None] | None = None
        self._thread = threading.Thread(
            target=self._run, args=(pin, memory), name="late-pin", daemon=True
        )
        self._thread.start()

    def undo(self) -> None:
        """Waits until it has ended, and undoes it; any thread may call it."""
        self._thread.join()
        if self._unpin is not None:
            self._unpin()

    def _run(self, pin: Callable[[memoryview], Callable[[], None]], memory: memoryview) -> None:
        try:
            self._unpin = pin(memory)
        except UserError as error:
            logger.warning("copies into memory that is not pinned take longer: %s", str(error))


class NamelessFile(Closing):
    """Zeros in the file system of a folder, mapped; they go with the process while nameless."""

    def __init__(
        self,
        folder: Path,
        total_bytes: int,
        pin: Callable[[memoryview], Callable[[], None]] | None = None,
    ) -> None:
        """Reserves all bytes, and begins to pin them.

        Args:
            pin: makes memory a target of asynchronous copies; returns what undoes it. None: no
                device is going to write there.

        Raises:
            OSError: the file system is full, or has no files without a name.
        """
        self.total_bytes = total_bytes
        self._descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, total_bytes)
            self.mapping = mmap.mmap(self._descriptor, total_bytes)
        except OSError:
            os.close(self._descriptor)
            raise
        self.unpin = None if pin is None else LatePin(pin, memoryview(self.mapping)).undo
        self._letting_go = weakref.finalize(self, _let_go, self._descriptor, self.unpin)
        self._letting_go.atexit = False

    def fits(self, size_bytes: int) -> bool:
        """Returns whether a file of that size has room in it."""
        return size_bytes <= self.total_bytes

    def link(self, path: Path) -> None:
        """Gives the file a name, under which the memory belongs to who has it mapped.

        Raises:
            OSError: the system refuses.
        """
        # Without a folder `os.link` does not follow the link to the file.
        source = f"/proc/self/fd/{self._descriptor}"
        os.link(source, path, src_dir_fd=self._descriptor, follow_symlinks=True)
        self._letting_go.detach()
        os.close(self._descriptor)

    def close(self) -> None:
        """Gives the memory back."""
        if self._letting_go.alive:
            self._letting_go()
            with contextlib.suppress(BufferError):
                self.mapping.close()


def _let_go(descriptor: int, unpin: Callable[[], None] | None) -> None:
    if unpin is not None:  # before its mapping ends
        unpin()
    os.close(descriptor)
