# SPDX-License-Identifier: Apache-2.0
"""The folder of durable checkpoints: atomic commits, damage detection, choice, retention.

    DIR/latest_checkpointed_iteration.txt     the newest whole checkpoint, as Megatron-LM names it
    DIR/iter_0000100/                         a whole checkpoint (torch_dist)
    DIR/release/                              weights alone, by a converter; the tracker says so
    DIR/moevement/iter_0000100.json           size and checksum of each of its files
    DIR/moevement/history.json                names the history of training that saves here now
    DIR/moevement/iter_0000100.writing/       one that is being written, or was when a job died
    DIR/moevement/iter_0000100.replaced/      one that is being replaced, and its list of files
    DIR/moevement/iter_0000100.replaced.json

A checkpoint is written under another name and gets its own by one rename, after its checksums. All
methods that act are called by rank 0 alone, those of `CheckpointStore` by all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

_RELEASE = "release"
TRACKER = "latest_checkpointed_iteration.txt"
_HISTORY = "history.json"
_CHUNK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one file of a checkpoint."""

    size_bytes: int
    xxh3_128: str


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    sync(path.parent)


def check_writable(folder: Path) -> None:
    """Raises OSError when no file could be written into a folder."""
    probe = folder / f".probe-{os.getpid()}"
    probe.write_text("")
    probe.unlink()


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_file(path: Path) -> FileRecord:
    """Returns size and checksum of a file."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size_bytes=size, xxh3_128=digest.hexdigest())


class CheckpointFolder:
    """Names and moves of one folder of checkpoints on a file system that all ranks share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._own = root / "moevement"

    def path(self, iteration: int) -> Path:
        """Returns where the whole checkpoint of an iteration lies."""
        return self.root / (_RELEASE if self.is_release(iteration) else f"iter_{iteration:07d}")

    def is_release(self, iteration: int) -> bool:
        """Returns whether this is what a converter wrote: weights alone, as iteration 0."""
        return iteration == 0 and self._tracked() == _RELEASE

    def iterations(self) -> list[int]:
        """Returns the iterations of all checkpoints that carry their final name, newest first."""
        if not self.root.is_dir():
            return []
        names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in self.root.iterdir())
        found = {int(match[1]) for match in names if match}
        if self._tracked() == _RELEASE and (self.root / _RELEASE).is_dir():
            found.add(0)
        return sorted(found, reverse=True)

    def candidates(self) -> list[int]:
        """Returns the iterations to resume from, best first.

        The one that the tracker names comes first, then the older ones: who resumed from an older
        checkpoint has left newer ones of another history behind. They come last, newest first.
        """
        iterations, latest = self.iterations(), self.latest()
        if latest is None:
            return iterations
        return sorted(iterations, key=lambda k: (k > latest, -k))

    def begin_history(self) -> None:
        """Begins a history of training: checkpoints that are here already are not of it."""
        self._own.mkdir(parents=True, exist_ok=True)
        write_atomically(self._own / _HISTORY, json.dumps({"history": secrets.token_hex(16)}))

    def of_history(self) -> list[int]:
        """Returns the iterations that the present history of training has saved, newest first."""
        history = _history_in(self._own / _HISTORY)
        return [
            k
            for k in self.iterations()
            if history is not None and _history_in(self._manifest(k)) == history
        ]

    def latest(self) -> int | None:
        """Returns the iteration that the tracker file names, None without a readable one."""
        told = self._tracked()
        if told == _RELEASE:
            return 0
        try:
            return int(told)
        except ValueError:
            return None

    def _tracked(self) -> str:
        try:
            return (self.root / TRACKER).read_text().strip()
        except (OSError, ValueError):
            return ""

    def check_writable(self) -> None:
        """Raises OSError when no checkpoint could be written here."""
        self._own.mkdir(parents=True, exist_ok=True)
        check_writable(self._own)

    def begin(self, iteration: int) -> Path:
        """Clears what dead jobs left and returns an empty folder to write a checkpoint into."""
        self._own.mkdir(parents=True, exist_ok=True)
        self.recover()
        for left_over in self._left_over():
            shutil.rmtree(left_over)
        for temporary in self._own.glob(".*"):
            temporary.unlink()
        folder = self.writing(iteration)
        folder.mkdir()
        return folder

    def left_over_bytes(self) -> int:
        """Returns the size of what dead jobs left and `begin` clears."""
        files = (path for folder in self._left_over() for path in folder.rglob("*"))
        return sum(path.stat().st_size for path in files if path.is_file())

    def abandon(self, iteration: int) -> None:
        """Removes an unfinished checkpoint."""
        shutil.rmtree(self.writing(iteration), ignore_errors=True)

    def commit(self, iteration: int, files: Mapping[str, FileRecord]) -> None:
        """Gives a finished checkpoint its name; from now on it is the newest one."""
        final = self.path(iteration)
        replaced = self._own / f"{final.name}.replaced"
        replaced_manifest = self._own / f"{final.name}.replaced.json"
        manifest = {name: dataclasses.asdict(record) for name, record in sorted(files.items())}
        if final.exists():
            os.replace(final, replaced)
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._manifest(iteration), replaced_manifest)
        history = _history_in(self._own / _HISTORY)
        document = {"files": manifest, "history": history}
        write_atomically(self._manifest(iteration), json.dumps(document, indent=1))
        os.replace(self.writing(iteration), final)
        sync(self.root)
        replaced_manifest.unlink(missing_ok=True)
        shutil.rmtree(replaced, ignore_errors=True)
        write_atomically(self.root / TRACKER, f"{iteration}\n")

    def recover(self) -> None:
        """Brings back a checkpoint whose replacement was interrupted, with its list of files."""
        for replaced in self._own.glob("iter_*.replaced"):
            name = replaced.name.removesuffix(".replaced")
            final, manifest = self.root / name, self._own / f"{replaced.name}.json"
            if final.exists():
                manifest.unlink(missing_ok=True)
                shutil.rmtree(replaced)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.replace(manifest, self._own / f"{name}.json")
                os.replace(replaced, final)

    def manifest(self, iteration: int) -> dict[str, FileRecord] | None:
        """Returns the files that a whole checkpoint consists of, None without a readable list."""
        try:
            files = json.loads(self._manifest(iteration).read_text())["files"]
            return {name: FileRecord(**record) for name, record in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def damage(self, iteration: int, names: Iterable[str] | None = None) -> str | None:
        """Returns what is wrong with a checkpoint, None when it is whole.

        Args:
            names: the files to read; all by default.
        """
        manifest = self.manifest(iteration)
        if manifest is None:
            return "it has no list of its files"
        for name in sorted(manifest) if names is None else names:
            try:
                found = record_file(self.path(iteration) / name)
            except OSError as error:
                return f"{name} can't be read: {error.strerror}"
            if found != manifest[name]:
                sizes = f"{found.size_bytes} of {manifest[name].size_bytes} bytes"
                return f"{name} is damaged ({sizes}, checksum differs)"
        return None

    def retain(self, interval: int, newest: int) -> list[int]:
        """Removes checkpoints that are neither at a multiple of the interval nor the newest."""
        removed = [k for k in self.iterations() if k % interval and k < newest]
        for iteration in removed:
            shutil.rmtree(self.path(iteration), ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                self._manifest(iteration).unlink()
        return removed

    def _left_over(self) -> Iterator[Path]:
        return self._own.glob("iter_*.writing")

    def writing(self, iteration: int) -> Path:
        """Returns where an unfinished checkpoint lies."""
        return self._own / f"iter_{iteration:07d}.writing"

    def _manifest(self, iteration: int) -> Path:
        return self._own / f"iter_{iteration:07d}.json"


def _history_in(path: Path) -> str | None:
    """Returns the history of training that a file names; None: none, or it can't be read."""
    try:
        history = json.loads(path.read_text())["history"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return history if isinstance(history, str) else None


def checkpoint_files(folder: Path) -> Iterator[str]:
    """Yields the names of the files in a checkpoint, relative to it, in a fixed order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(folder))
