# SPDX-License-Identifier: Apache-2.0
"""What a piece of code leaves open: threads, descriptors, children, shared memory, groups.

    with no_leaks():
        ...             # raises LeakError for what is open after it and was not before

Reads `/proc` and nothing else, so it costs a fraction of a millisecond and sees what native code
opened too. `leaks_fixture` does this around every test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path

SETTLING_TIME_S = 2.0
"""Limit for what ends on its own: the kernel shows a thread a moment longer than `join` waits."""
_POLL_S = 0.01
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (looked at, nothing is created)


_FOLDER = re.compile(r"moevement-test-of-(\d+)-")


class ResourceKind(Enum):
    """What can leak."""

    THREAD = "thread"
    DESCRIPTOR = "descriptor"
    CHILD_PROCESS = "child process"
    SHARED_MEMORY = "shared-memory file"
    PROCESS_GROUP = "process group"


@dataclasses.dataclass(frozen=True)
class Resource:
    """Something open. Two are the same when kind and identity are."""

    kind: ResourceKind
    identity: str
    description: str = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.identity} ({self.description})"


class LeakError(AssertionError):
    """Something is still open that was not before."""

    def __init__(self, leaked: tuple[Resource, ...]) -> None:
        super().__init__("leaked: " + "; ".join(str(resource) for resource in leaked))
        self.leaked = leaked


def folder_prefix() -> str:
    """Begins the name of a folder in shared memory that a test of this process has.

    Another run of tests beside this one has its own, and looks after them.
    """
    return f"moevement-test-of-{os.getpid()}-"


def open_resources() -> frozenset[Resource]:
    """Returns what the process has open now, without what is allowed to stay open.

    Allowed is only the resource tracker of `multiprocessing` with its pipe: the first user of
    shared memory starts it, and by design it stays until the interpreter ends.
    """
    allowed = _resource_tracker()
    found = [*_threads(), *_descriptors(), *_children(), *_shared_memory(), *_process_groups()]
    return frozenset(resource for resource in found if resource not in allowed)


def leaked_since(
    before: frozenset[Resource], ignoring: Collection[ResourceKind] = ()
) -> tuple[Resource, ...]:
    """Returns what is open, was not before, and stays open.

    What appears later in shared memory is another job's: everything of ours was there at once.

    Args:
        before: what `open_resources` found then.
        ignoring: kinds that somebody else may open and close meanwhile.
    """

    def opened() -> frozenset[Resource]:
        found = open_resources() - before
        return frozenset(resource for resource in found if resource.kind not in ignoring)

    if not opened():
        return ()
    gc.collect()
    leaked = opened()
    deadline = time.monotonic() + SETTLING_TIME_S
    while leaked and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # Described as it is now: at first a child is not yet what it executes.
        leaked = frozenset(resource for resource in open_resources() if resource in leaked)
    mine = {resource for resource in leaked if not _is_held_elsewhere(resource)}
    # What another job has closed by now was nobody's when it was looked up.
    return tuple(sorted(mine & open_resources(), key=str))


@contextlib.contextmanager
def no_leaks() -> Iterator[None]:
    """Checks that the block leaves nothing open; when it raises, its own error is enough.

    Raises:
        LeakError: something is open after the block that was not before it.
    """
    before = open_resources()
    yield
    if leaked := leaked_since(before):
        raise LeakError(leaked)


def _threads() -> Iterator[Resource]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for thread_id in os.listdir("/proc/self/task"):
        name = names.get(int(thread_id)) or _text(Path(f"/proc/self/task/{thread_id}/comm"))
        yield Resource(ResourceKind.THREAD, thread_id, name)


def _descriptors() -> Iterator[Resource]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the descriptor of this listing
        yield Resource(ResourceKind.DESCRIPTOR, f"{number} -> {target}", "open")


def _children() -> Iterator[Resource]:
    for thread_id in os.listdir("/proc/self/task"):
        for pid in _text(Path(f"/proc/self/task/{thread_id}/children")).split():
            command = _text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
            yield Resource(ResourceKind.CHILD_PROCESS, pid, command or "not waited for")


def _shared_memory() -> Iterator[Resource]:
    if not _SHARED_MEMORY.is_dir():
        return
    for entry in os.scandir(_SHARED_MEMORY):
        of_a_run = _FOLDER.match(entry.name)
        if of_a_run is None or int(of_a_run[1]) == os.getpid():
            yield Resource(ResourceKind.SHARED_MEMORY, entry.path, f"inode {entry.inode()}")


def _process_groups() -> Iterator[Resource]:
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return
    for name in distributed._world.pg_names.values():  # noqa: SLF001  (no public list of groups)
        yield Resource(ResourceKind.PROCESS_GROUP, str(name), "torch.distributed")


def _resource_tracker() -> frozenset[Resource]:
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    descriptor: int | None = getattr(tracker, "_fd", None)
    if descriptor is None:
        return frozenset()
    identity = f"{descriptor} -> {os.readlink(f'/proc/self/fd/{descriptor}')}"
    return frozenset(
        {
            Resource(ResourceKind.DESCRIPTOR, identity, ""),
            Resource(ResourceKind.CHILD_PROCESS, str(getattr(tracker, "_pid", None)), ""),
        }
    )


def _is_held_elsewhere(resource: Resource) -> bool:
    """Whether a shared-memory file is another job's: a process that is not ours has it open.

    So it is with a folder in which another process has a file open. Looked up only for what
    appeared during the check.
    """
    if resource.kind is not ResourceKind.SHARED_MEMORY:
        return False
    own = {str(os.getpid())} | {child.identity for child in _children()}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name not in own:
            maps = _text(process / "maps")
            if f" {resource.identity}\n" in maps or f" {resource.identity}/" in maps:
                return True
            with contextlib.suppress(OSError):
                open_files = {os.readlink(fd) for fd in (process / "fd").iterdir()}
                folder = f"{resource.identity}/"
                if any(one == resource.identity or one.startswith(folder) for one in open_files):
                    return True
    return False


def _text(path: Path) -> str:
    """Returns the text of a `/proc` file, nothing when its process or thread has just ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
