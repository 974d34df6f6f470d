# SPDX-License-Identifier: Apache-2.0
"""A preallocated file in memory: whole from the moment it has its name, stamped, mode 0600.

The header is one page: magic, length, JSON, zeros, and a checksum of all that at the page's end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self

import xxhash

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.slots.available_memory import available_memory_bytes
from megatron_moevement.runtime.slots.nameless_file import NamelessFile
from megatron_moevement.runtime.slots.store_identity import DamagedFileError, StoreIdentity

PAGE_BYTES = mmap.PAGESIZE
CREATING_SUFFIX = ".creating"
"""Ends the name of a file that is not whole yet; one that a kill left behind is nobody's."""

_MAGIC_BYTES = 8
_MOUNTS = Path("/proc/self/mounts")
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")


class Access(Enum):
    """What a process does with a file of the store."""

    WRITE = mmap.ACCESS_WRITE
    READ = mmap.ACCESS_READ


def checksum_of(data: bytes | bytearray | memoryview) -> int:
    """Returns the checksum that guards everything in the store: XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_of_pieces(pieces: Iterable[bytes | memoryview]) -> int:
    """Returns the checksum of bytes that come in pieces."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def page_aligned(size_bytes: int) -> int:
    """Returns a size rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class MappedFile:
    """A file of the store, mapped into memory; the page that tells what it is comes first.

    A subclass says by `MAGIC`, eight bytes, which kind of file it is, and reads the header.
    """

    MAGIC: ClassVar[bytes]

    def __init__(self, path: Path, header: Mapping[str, Any], mapping: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self._mapping = mapping
        self._view: memoryview | None = memoryview(mapping)

    @classmethod
    def _create(
        cls,
        path: Path,
        identity: StoreIdentity,
        header: Mapping[str, Any],
        *,
        total_bytes: int,
        contents: Mapping[int, bytes] | None = None,
        reserve: NamelessFile | None = None,
    ) -> Self:
        """Creates a file of zeros with a header, in place of the one of that name.

        All its bytes are reserved: a file system that is full later can't take them away, which
        would end the process with a bus error.

        Args:
            header: what its kind needs to know; JSON.
            total_bytes: size of the file, header page included.
            contents: bytes to write at offsets before the file gets its name.
            reserve: memory of at least its size to be used.

        Raises:
            UserError: the file system is full or refuses the file.
        """
        total_bytes = total_bytes if reserve is None else reserve.total_bytes
        document = {**header, "identity": identity.document(), "total_bytes": total_bytes}
        page = _header_page(cls.MAGIC, document)
        left_bytes = free_bytes(path.parent)
        if reserve is None and total_bytes > left_bytes:
            raise out_of_space(path, total_bytes, left_bytes)
        temporary = path.with_name(path.name + CREATING_SUFFIX)
        try:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            if reserve is not None:
                reserve.mapping[:PAGE_BYTES] = page
                reserve.link(temporary)
                temporary.rename(path)
                return cls(path, document, reserve.mapping)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, total_bytes)
                for offset, data in {0: page, **(contents or {})}.items():
                    os.pwrite(descriptor, data, offset)
                mapping = mmap.mmap(descriptor, total_bytes)
                temporary.rename(path)
            finally:
                os.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise _refusal(error, path, total_bytes) from error
        return cls(path, document, mapping)

    @classmethod
    def open(
        cls, path: Path, identity: StoreIdentity | None, access: Access = Access.WRITE
    ) -> Self:
        """Opens a file that somebody left; what a kill cut is put in order.

        Args:
            identity: whose it has to be; None takes anybody's, to look at it.

        Raises:
            FileNotFoundError: there is no such file.
            DamagedFileError: it is no such file, or does not read as it was written.
            UserError: it is another job's, or the system refuses it.
        """
        try:
            mode = os.O_RDWR if access is Access.WRITE else os.O_RDONLY
            descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UserError(f"can't open {path}: {error.strerror or error}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFileError(f"{path} is no regular file")
            document = _read_header(os.pread(descriptor, PAGE_BYTES, 0), cls.MAGIC, path)
            found = StoreIdentity.out_of(document["identity"])
            if identity is not None:
                identity.check(found, path)
            total_bytes = int(document["total_bytes"])
            if status.st_size != total_bytes:
                raise DamagedFileError(
                    f"{path} has {status.st_size} bytes, it was made with {total_bytes}"
                )
            mapping = mmap.mmap(descriptor, total_bytes, access=access.value)
        finally:
            os.close(descriptor)
        opened = cls(path, document, mapping)
        try:
            opened._take_over(access)
        except DamagedFileError:
            opened.close()
            raise
        return opened

    def _take_over(self, access: Access) -> None:
        """Checks what somebody left, and puts it in order where it may be written.

        Raises:
            DamagedFileError: it does not read as it was written.
        """

    @property
    def identity(self) -> StoreIdentity:
        """Whose file it is."""
        return StoreIdentity.out_of(self.header["identity"])

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return int(self.header["total_bytes"])

    @property
    def view(self) -> memoryview:
        """All bytes of the file.

        Raises:
            ValueError: the file is closed.
        """
        if self._view is None:
            raise ValueError(f"{self.path} is closed")
        return self._view

    def close(self) -> None:
        """Lets go of the file; its mapping ends when the last tensor or view into it is gone."""
        view, self._view = self._view, None
        with contextlib.suppress(BufferError):
            if view is not None:
                view.release()
            self._mapping.close()


def _header_page(magic: bytes, document: Mapping[str, Any]) -> bytes:
    if len(magic) != _MAGIC_BYTES:
        raise ValueError(f"{magic!r} has not {_MAGIC_BYTES} bytes")
    text = json.dumps(document).encode()
    page = magic + _LENGTH.pack(len(text)) + text
    body_bytes = PAGE_BYTES - _CHECKSUM.size
    if len(page) > body_bytes:
        raise ValueError(f"a header of {len(text)} bytes does not fit into a page")
    body = page.ljust(body_bytes, b"\0")
    return body + _CHECKSUM.pack(checksum_of(body))


def _read_header(page: bytes, magic: bytes, path: Path) -> dict[str, Any]:
    """Returns the document of a header page, checked before anything of it is read."""
    body, checksum = page[: -_CHECKSUM.size], page[-_CHECKSUM.size :]
    if len(page) != PAGE_BYTES or _CHECKSUM.pack(checksum_of(body)) != checksum:
        raise DamagedFileError(f"{path} has a damaged header")
    if body[:_MAGIC_BYTES] != magic:
        raise DamagedFileError(f"{path} is no {magic.decode(errors='replace')} file")
    (length,) = _LENGTH.unpack_from(body, _MAGIC_BYTES)
    start = _MAGIC_BYTES + _LENGTH.size
    document: dict[str, Any] = json.loads(body[start : start + length])
    return document


def free_bytes(folder: Path) -> int:
    """Returns how many bytes a file system has left for this user.

    One in memory may promise more than there is for this process: reserving that would make the
    kernel kill processes.
    """
    status = os.statvfs(folder)
    left = status.f_bavail * status.f_frsize
    return min(left, available_memory_bytes()) if is_in_memory(folder) else left


def is_in_memory(folder: Path) -> bool:
    """Returns whether the file system of a folder lies in memory."""
    device = folder.stat().st_dev
    for line in _MOUNTS.read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if kind in {"tmpfs", "ramfs"}:
            # Some mounts are not for everybody's eyes; the store's own is.
            with contextlib.suppress(OSError):
                if Path(mount).stat().st_dev == device:
                    return True
    return False


def _refusal(error: OSError, path: Path, total_bytes: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        with contextlib.suppress(OSError):
            return out_of_space(path, total_bytes, free_bytes(path.parent))
    return UserError(f"can't create {path} of {total_bytes} bytes: {error.strerror or error}")


def out_of_space(path: Path, needed_bytes: int, left_bytes: int) -> UserError:
    """Returns the error that says how much there is too little of, and what helps."""
    return UserError(
        f"{path} needs {needed_bytes} bytes and its file system has {left_bytes} left; enlarge it "
        "(a container: --shm-size), give --moevement-store-dir on another one, lower "
        "--moevement-replicas, or give --moevement-window a smaller W"
    )
