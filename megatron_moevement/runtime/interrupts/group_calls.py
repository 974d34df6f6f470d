"""Group calls of NCCL: what fails within one closes it.

NCCL runs nothing that a thread asks for while a group of calls is open, on any communicator, and
counts open groups by thread, whatever becomes of communicators. Torch (2.13) leaves the group of a
batch of messages open where one of them raises an error, as the first call after an abort does. The
thread of a rank that survives would never send anything again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.runtime.rebindings import rebind

_c10d: Any = dist.distributed_c10d
_coalescing = _c10d._coalescing_manager  # noqa: SLF001  (no public name)


@contextlib.contextmanager
def _closing_manager(
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    async_ops: bool = False,
) -> Iterator[Any]:
    """Does what torch does, and closes the group of calls after an exception."""
    try:
        with _coalescing(group, device, async_ops) as manager:
            yield manager
    except BaseException:
        close_calls()
        raise


def close_calls() -> None:
    """Closes the groups of calls that the calling thread has open; the training thread calls it."""
    nccl = getattr(_c10d, "ProcessGroupNCCL", None)
    if nccl is None:
        return
    with contextlib.suppress(RuntimeError):  # none is open any more
        while True:
            nccl._group_end()  # noqa: SLF001  (no public name)


def close_calls_that_fail() -> None:
    """Closes groups of calls after an exception from now on, in all of this process."""
    rebind(f"{_c10d.__name__}:_coalescing_manager", _closing_manager)
