# SPDX-License-Identifier: Apache-2.0
"""Where tiers lie: a folder, or whatever fsspec reaches by a URL."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import fsspec

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.security.ownership import check_folder
from megatron_moevement.runtime.slots.mapped_file import CREATING_SUFFIX

FLAG = "--moevement-tier-dir"


class Target(ABC):
    """A folder of files that are written once, by names with at most one slash.

    Any thread calls it. What is refused is an `OSError`, or whatever a library of fsspec raises.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        """For people."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Returns the names in the folder, or in one within it; none where there is no such."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Returns a file to be written, which is there at the end of the `with`."""

    @abstractmethod
    def sync(self, file: IO[bytes]) -> None:
        """Brings what was written so far to where it stays, so that less is left for the end."""

    @abstractmethod
    def read(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Returns a file to be read.

        Raises:
            FileNotFoundError: there is none.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it; nothing where there is none."""


class Folder(Target):
    """A folder of this machine, or one that all machines share; files are ours alone."""

    def __init__(self, root: Path) -> None:
        """Makes no folder yet.

        Args:
            root: of one run.
        """
        super().__init__(str(root))
        self._root = root

    def names(self, folder: str = "") -> list[str]:
        """Returns the names in the folder, or in one within it; what is not whole is not there."""
        try:
            found = os.listdir(self._root / folder)
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.endswith(CREATING_SUFFIX))

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Yields a file that gets its name when all of it is on the disk, or is gone."""
        path = self._root / name
        self._make(path.parent)
        creating = path.with_name(f"{path.name}{CREATING_SUFFIX}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(creating, flags, 0o600), "wb") as file:
                yield file
                self.sync(file)
            creating.rename(path)
            _sync(path.parent)
        except BaseException:
            creating.unlink(missing_ok=True)
            raise

    def sync(self, file: IO[bytes]) -> None:
        """Brings what was written so far to the disk."""
        file.flush()
        os.fsync(file.fileno())

    def read(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Returns a file to be read."""
        return open(os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")

    def remove(self, name: str) -> None:
        """Removes a file or a folder; what another process has removed meanwhile is gone."""
        path = self._root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def _make(self, folder: Path) -> None:
        self._root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(self._root.parent, FLAG)
        for each in (self._root, folder):
            each.mkdir(mode=0o700, exist_ok=True)


class Url(Target):
    """What fsspec reaches by a URL: a file counts by what names it, so its name is used once."""

    def __init__(self, url: str, run_id: str) -> None:
        """Opens the file system.

        Raises:
            UserError: fsspec has none for this URL, or its library is not installed.
        """
        super().__init__(f"{url.rstrip('/')}/{run_id}")
        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UserError(f"{FLAG} {url}: {error}") from error
        self._root = f"{root.rstrip('/')}/{run_id}"

    def names(self, folder: str = "") -> list[str]:
        """Returns the names in the folder, or in one within it."""
        path = f"{self._root}/{folder}".rstrip("/")
        self._system.invalidate_cache()
        try:
            found = self._system.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(one.rstrip("/").rsplit("/", 1)[-1] for one in found)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Yields a file that is there at the end; what was cut may stay, and no manifest names it.

        Nothing relies on a file being whole because it has its name.
        """
        path = f"{self._root}/{name}"
        self._make(path.rpartition("/")[0])
        try:
            with self._system.open(path, "wb") as file:
                yield file
        except BaseException:
            with contextlib.suppress(Exception):  # what could not be written may not be there
                self._system.rm_file(path)
            raise

    def sync(self, file: IO[bytes]) -> None:
        """Does nothing: the library sends what it has as soon as it is enough for one request."""

    def read(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Returns a file to be read."""
        file: AbstractContextManager[IO[bytes]] = self._system.open(f"{self._root}/{name}", "rb")
        return file

    def remove(self, name: str) -> None:
        """Removes a file or a folder."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(f"{self._root}/{name}", recursive=True)

    def _make(self, folder: str) -> None:
        """Makes a folder, that of the run and that of the URL; never a bucket that is not there."""
        place = self._root.rpartition("/")[0]
        for each in (place, self._root, folder):
            if "/" in each.strip("/"):
                with contextlib.suppress(FileExistsError):
                    self._system.mkdir(each, create_parents=False)


def open_target(place: str, run_id: str) -> Target:
    """Returns where the tiers of a run lie; nothing is made there yet.

    Args:
        place: a folder, or a URL for fsspec.

    Raises:
        UserError: no library reads such a URL, or another user could put other files in the place
            of ours.
    """
    if "://" in place:
        return Url(place, run_id)
    folder = Path(place).absolute()
    with contextlib.suppress(OSError):  # what can't be looked at is reported when it is written
        check_folder(folder, FLAG)
    return Folder(folder / run_id)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
