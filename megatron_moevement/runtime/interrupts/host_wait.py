# SPDX-License-Identifier: Apache-2.0
"""Waits of the host for what a device runs, in a way that a restart can interrupt.

A `wait` of NCCL does not block the host, but reading a result does, in native code and for as long
as another rank takes: no interrupt arrives, and the progress watchdog takes the rank that waits for
one that hangs. So the host looks whether a collective has ended before it reads what came of it.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_moevement.runtime.rebindings import GATHERINGS, rebind

_FIRST_PAUSE_S = 0.00002
_LONGEST_PAUSE_S = 0.002
_SHARE = 0.125
"""Of the time waited so far, that a look may come too late by."""


def await_on_host(work: dist.Work | None) -> None:
    """Waits until a collective has ended and its results can be read without a wait.

    Args:
        work: of a collective that was begun with `async_op=True`; None on ranks outside its group.
    """
    if work is None:
        return
    began_s = time.perf_counter()
    while not work.is_completed():
        waited_s = time.perf_counter() - began_s
        time.sleep(min(max(_FIRST_PAUSE_S, _SHARE * waited_s), _LONGEST_PAUSE_S))
    work.wait()


def _awaited(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a collective that is awaited on the host, unless who calls it will wait."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def finish(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("async_op"):
            return collective(*args, **kwargs)
        call.arguments["async_op"] = True
        return await_on_host(collective(*call.args, **call.kwargs))

    return finish


_collectives = {name: getattr(dist, name) for name in GATHERINGS}


def poll_before_reads() -> None:
    """Awaits on the host, from now on and in all of this process, what is read after its end.

    Upstream gathers so in saves and loads, and joins ranks by barriers. What a step's computation
    goes on with is not awaited.
    """
    for name, collective in _collectives.items():
        awaited = _awaited(collective)
        rebind(f"torch.distributed:{name}", awaited)
        rebind(f"{dist.distributed_c10d.__name__}:{name}", awaited)
