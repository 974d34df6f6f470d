# SPDX-License-Identifier: Apache-2.0
"""Group calls of NCCL: what fails within one closes it.

NCCL runs nothing that a thread asks for while a group of calls is open, on any communicator, and
counts open groups by thread, whatever becomes of communicators. Torch (2.13) leaves the group of a
batch of messages open where one of them raises an error, as the first call after an abort does. The
thread of a rank that survives would never send anything again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.runtime.rebindings import rebind

_c10d: Any = dist.distributed_c10d
_coalescing = _c10d._coalescing_manager  # noqa: SLF001  (no public name)
_opened = threading.local()
"""`backend`: what of NCCL's the thread has opened a group of calls with. Only such an object closes
one, and torch has none left after an abort."""


@contextlib.contextmanager
def _closing_manager(
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[Any]:
    """Does what torch does, and closes the group of calls after an exception."""
    _opened.backend = None  # torch opens no group of calls without a device
    if device is not None:
        _opened.backend = _of_nccl(group or _c10d._get_default_group(), device)  # noqa: SLF001
    try:
        with _coalescing(group, device, async_ops) as manager:
            yield manager
    except BaseException:
        close_calls()
        raise
    _opened.backend = None


def close_calls() -> None:
    """Closes the groups of calls that the calling thread has open; the training thread calls it."""
    backend = getattr(_opened, "backend", None)
    if backend is None:
        return
    with contextlib.suppress(RuntimeError):  # none is open any more
        while True:
            backend._group_end()  # noqa: SLF001  (no public name)
    _opened.backend = None


def close_calls_that_fail() -> None:
    """Closes groups of calls after an exception from now on, in all of this process."""
    rebind(f"{_c10d.__name__}:_coalescing_manager", _closing_manager)


def _of_nccl(group: Any, device: torch.device) -> Any | None:
    """Returns what sends a process group's tensors on a device, if that is NCCL."""
    nccl = getattr(_c10d, "ProcessGroupNCCL", None)  # of builds of torch with it
    backend = group._get_backend(device)  # noqa: SLF001  (no public name)
    return backend if nccl is not None and isinstance(backend, nccl) else None
