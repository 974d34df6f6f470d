# SPDX-License-Identifier: Apache-2.0
"""What CUDA keeps account of in one process, and raises about.

Host memory is registered in intervals, as with `cudaHostRegister`: one that overlaps another one is
an error, and so is one whose memory was unmapped before it was unregistered. Each thread has a
current device of its own, which is device 0 in a new thread. Whoever makes a device current makes
its context, which takes device memory and opens a descriptor that a forked process inherits.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path

REGISTERED = 0


class StrictCudaError(RuntimeError):
    """A GPU would refuse that, or lose memory by it."""


@dataclasses.dataclass(frozen=True)
class _Interval:
    """Registered host memory, and what was mapped there then."""

    start: int
    end: int
    mapped: tuple[str, ...]


class StrictRuntime:
    """The runtime of one process.

    Args:
        devices: GPUs of the machine.
        markers: folder in which a context opens a file, named after its device and its process; a
            line for each registration says when and by which thread, in a file for each process.
    """

    def __init__(self, devices: int, markers: Path | None = None) -> None:
        self.devices = devices
        self.contexts: dict[int, str] = {}
        """Devices with a context, each with the thread that made it."""
        self._markers = markers
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._intervals: dict[int, _Interval] = {}

    @property
    def registered_bytes(self) -> int:
        """Bytes of host memory that are registered."""
        return sum(each.end - each.start for each in self._intervals.values())

    @property
    def device(self) -> int:
        """The current device of the calling thread."""
        return getattr(self._thread, "device", 0)

    def set_device(self, device: int) -> None:
        """Makes a device current, and its context where there is none."""
        if not 0 <= device < self.devices:
            raise StrictCudaError(f"no device {device}")
        self._thread.device = device
        self.use_device()

    def forget_device(self, device: int) -> None:
        """Makes a device without a context current, and makes none."""
        self._thread.device = device

    def use_device(self) -> None:
        """Makes the context of the current device where there is none, as most calls do."""
        with self._lock:
            if self.device in self.contexts:
                return
            self.contexts[self.device] = threading.current_thread().name
            if self._markers is not None:
                name = f"device{self.device}-{os.getpid()}"
                os.open(self._markers / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        """Registers host memory.

        Raises:
            StrictCudaError: a part of it is registered, not mapped, or was unmapped meanwhile.
        """
        del flags
        self.use_device()
        with self._lock:
            self._check_mapped()
            new = _Interval(address, address + size_bytes, _mapped(address, address + size_bytes))
            for each in self._intervals.values():
                if each.start < new.end and new.start < each.end:
                    raise StrictCudaError(f"host memory is already registered: {each}, {new}")
            self._intervals[address] = new
            if self._markers is not None:
                line = f"{time.time()} {threading.current_thread().name}\n"
                with (self._markers / f"pinned-{os.getpid()}").open("a") as notes:
                    notes.write(line)
        return REGISTERED

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Undoes `cudaHostRegister`.

        Raises:
            StrictCudaError: nothing is registered there, or it was unmapped.
        """
        self.use_device()
        with self._lock:
            self._check_mapped()
            if self._intervals.pop(address, None) is None:
                raise StrictCudaError(f"host memory at {address:#x} is not registered")
        return REGISTERED

    def check(self) -> None:
        """Checks that nothing was unmapped that is registered.

        Raises:
            StrictCudaError: something was.
        """
        with self._lock:
            self._check_mapped()

    def _check_mapped(self) -> None:
        for each in self._intervals.values():
            if _mapped(each.start, each.end) != each.mapped:
                raise StrictCudaError(f"registered host memory was unmapped: {each}")


def _mapped(start: int, end: int) -> tuple[str, ...]:
    """Returns which files are mapped into an interval, by device and inode.

    Raises:
        StrictCudaError: a part of it is not mapped.
    """
    found, covered = [], start
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, _, _, device, inode, *_ = line.split()
        first, last = (int(part, 16) for part in addresses.split("-"))
        if first <= covered < last:
            found.append(f"{device} {inode}")
            covered = last
        if covered >= end:
            return tuple(dict.fromkeys(found))
    return ("nothing",)
