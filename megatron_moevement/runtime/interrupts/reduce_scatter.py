# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter on gloo, waited for like any other collective.

gloo has none of its own. c10d (torch 2.13) reduces copies of the inputs on every rank, and takes
this rank's part in a `wait` that knows no limit: whoever waits gives no sign of life, and is out of
reach where gloo has lost a wake-up. Here the same is done where the wait is ours, with the same
bits. What was given up writes to its copies only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.runtime.rebindings import rebind


class _ReduceScatter:
    """One or several of them on their way; stands in for `Work`."""

    def __init__(
        self,
        group: Any,
        options: Any,
        reduced: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Begins to reduce.

        Args:
            reduced: what all ranks reduce in place.
            parts: views of that, this rank's.
        """
        limits: Any = dist.AllreduceOptions()
        limits.reduceOp = options.reduceOp
        limits.timeout = options.timeout
        self._parts, self._outputs = parts, outputs
        self._works = [group.allreduce([each], limits) for each in reduced]

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        for output, part in zip(self._outputs, self._parts, strict=True):
            output.copy_(part)
        return True


def _one(group: Any, output: torch.Tensor, own: torch.Tensor, options: Any) -> _ReduceScatter:
    return _several(group, [output], [own], options)


def _several(
    group: Any, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor], options: Any
) -> _ReduceScatter:
    copies = [one.clone() for one in own]
    parts = [copy.chunk(group.size())[group.rank()] for copy in copies]
    return _ReduceScatter(group, options, copies, parts, outputs)


def _in_parts(
    group: Any,
    outputs: Sequence[torch.Tensor],
    own: Sequence[Sequence[torch.Tensor]],
    options: Any,
) -> _ReduceScatter:
    """Takes lists of parts; Megatron's dispatcher has uneven ones of tensor-parallel experts."""
    copies = [[part.clone() for part in parts] for parts in own]
    parts = [each[group.rank()] for each in copies]
    return _ReduceScatter(group, options, list(chain(*copies)), parts, outputs)


def reduce_scatter_in_python() -> None:
    """Reduces and scatters so from now on, in all of this process; for gloo."""
    group = "torch.distributed:ProcessGroup"
    rebind(f"{group}.reduce_scatter", _in_parts)
    rebind(f"{group}.reduce_scatter_single", _one)
    rebind(f"{group}.reduce_scatter_single_coalesced", _several)
