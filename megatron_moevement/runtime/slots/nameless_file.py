"""A file in memory without a name: reserved and pinned before it is known whose it will be."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.closing import Closing


class NamelessFile(Closing):
    """Zeros in the file system of a folder, mapped; they go with the process while nameless."""

    def __init__(
        self,
        folder: Path,
        total_bytes: int,
        pin: Callable[[memoryview], Callable[[], None]] | None = None,
    ) -> None:
        """Reserves all bytes and pins them.

        Args:
            pin: makes memory a target of asynchronous copies; returns what undoes it. None: no
                device is going to write there.

        Raises:
            OSError: the file system is full, or has no files without a name.
            UserError: the system does not let so much memory be locked.
        """
        self.total_bytes = total_bytes
        self._descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, total_bytes)
            self.mapping = mmap.mmap(self._descriptor, total_bytes)
            self.unpin = None if pin is None else pin(memoryview(self.mapping))
        except (OSError, UserError):
            os.close(self._descriptor)
            raise
        self._unpinning = weakref.finalize(self, self.unpin or _leave)
        self._unpinning.atexit = False

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
        self._unpinning.detach()
        os.close(self._descriptor)

    def close(self) -> None:
        """Gives the memory back."""
        if self._unpinning.alive:
            self._unpinning()
            with contextlib.suppress(BufferError):
                self.mapping.close()
            os.close(self._descriptor)


def _leave() -> None:
    """Undoes nothing."""
