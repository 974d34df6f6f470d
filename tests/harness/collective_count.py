# SPDX-License-Identifier: Apache-2.0
"""Counts the collectives that a rank takes part in while a recovery replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.rejoin_barrier import RejoinBarrier
from megatron_moevement.training.loop import TrainingLoop
from tests.harness.restart_run import train_through

_COLLECTIVES = "c10d"
"""Namespace of torch's operations on process groups; sending and receiving is among them."""


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # upstream is not typed
    """Counts what passes torch's dispatcher on the thread that enters it."""

    def __init__(self) -> None:
        """Begins with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Does the operation."""
        del types
        self.count += operation.namespace == _COLLECTIVES
        return operation(*args, **(kwargs or {}))


def train_counting(
    flags: Sequence[str], restarts: Sequence[Mapping[str, Any]], mutation: str
) -> dict[str, Any]:
    """Does what `train_through` does, and counts while ranks replay or stand by.

    Args:
        flags: all flags of the job.
        restarts: one after the other, as JSON.
        mutation: what the rank does wrongly.

    Returns:
        What `train_through` returns, and of each recovery the `collectives`.
    """
    counts: list[CollectiveCount] = []
    catch_up, wait = TrainingLoop._catch_up, RejoinBarrier.wait  # noqa: SLF001

    def begin(self: TrainingLoop, target: int) -> StopRequest:
        counts.append(CollectiveCount())
        counts[-1].__enter__()  # type: ignore[no-untyped-call]
        return catch_up(self, target)

    def end(self: RejoinBarrier) -> None:
        wait(self)
        if _is_of_a_recovery(self):
            counts[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]

    _replace(TrainingLoop, "_catch_up", begin)
    _replace(RejoinBarrier, "wait", end)
    found = train_through(flags, restarts, mutation)
    return {**found, "collectives": [count.count for count in counts]}


def _is_of_a_recovery(rejoin_barrier: RejoinBarrier) -> bool:
    return rejoin_barrier._name.startswith("moevement/rejoin/")  # noqa: SLF001


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    assert hasattr(owner, name)
    setattr(owner, name, function)
