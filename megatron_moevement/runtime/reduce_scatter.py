"""Reduce-scatter on gloo, waited for like any other collective.

gloo has none of its own. c10d (torch 2.13) reduces copies of the inputs on every rank, and takes
this rank's part in a `wait` that knows no limit: whoever waits gives no sign of life, and is out of
reach where gloo has lost a wake-up. Here the same is done where the wait is ours, with the same
bits. What was given up writes to its copies only.

The form that takes a list of parts, which Megatron uses for uneven ones, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _ReduceScatter:
    """One or several of them on their way; stands in for `Work`."""

    def __init__(
        self,
        group: Any,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        options: Any,
    ) -> None:
        """Begins to reduce."""
        limits: Any = dist.AllreduceOptions()
        limits.reduceOp = options.reduceOp
        limits.timeout = options.timeout
        self._outputs = outputs
        self._copies = [one.clone() for one in inputs]
        self._part = (group.size(), group.rank())
        self._works = [group.allreduce([copy], limits) for copy in self._copies]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all of them and takes this rank's parts."""
        size, rank = self._part
        for work, copy, output in zip(self._works, self._copies, self._outputs, strict=True):
            work.wait() if timeout is None else work.wait(timeout)
            output.copy_(copy.chunk(size)[rank])
        return True


def _one(group: Any, output: torch.Tensor, own: torch.Tensor, options: Any) -> _ReduceScatter:
    return _ReduceScatter(group, [output], [own], options)


def _several(
    group: Any, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor], options: Any
) -> _ReduceScatter:
    return _ReduceScatter(group, outputs, own, options)


def reduce_scatter_in_python() -> None:
    """Reduces and scatters so from now on, in all of this process; for gloo."""
    group: Any = dist.ProcessGroup
    group.reduce_scatter_single = _one
    group.reduce_scatter_single_coalesced = _several
