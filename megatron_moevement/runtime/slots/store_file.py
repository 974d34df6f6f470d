"""What all files of the store have in common: they are mapped, stamped and opened alike."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from megatron_moevement.runtime.slots.identity import DamagedFileError, StoreIdentity
from megatron_moevement.runtime.slots.mapped_file import Access, MappedFile


class StoreFile:
    """A kind of file of the store; a subclass says by `MAGIC` which, and reads the header."""

    MAGIC: ClassVar[bytes]

    def __init__(self, file: MappedFile) -> None:
        """Use `create` or `open`."""
        self._file = file

    @classmethod
    def open(
        cls, path: Path, identity: StoreIdentity | None, access: Access = Access.WRITE
    ) -> Self:
        """Opens a file that somebody left; what a kill cut is put in order.

        Args:
            identity: whose it has to be; None takes anybody's, to look at it.

        Raises:
            FileNotFoundError: there is no such file.
            DamagedFileError: it does not read as it was written.
            UserError: it is another job's, or the system refuses it.
        """
        file = MappedFile.open(path, cls.MAGIC, identity, access)
        try:
            opened = cls(file)
            opened._take_over(access)
        except DamagedFileError:
            file.close()
            raise
        return opened

    @property
    def path(self) -> Path:
        """The file's name."""
        return self._file.path

    @property
    def identity(self) -> StoreIdentity:
        """Whose run it is part of."""
        return self._file.identity

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self._file.total_bytes

    def close(self) -> None:
        """Lets go of the file; the memory is mapped until the last tensor over it is gone."""
        self._file.close()

    def _take_over(self, access: Access) -> None:
        """Checks what somebody left, and puts it in order where it may be written.

        Raises:
            DamagedFileError: it does not read as it was written.
        """
