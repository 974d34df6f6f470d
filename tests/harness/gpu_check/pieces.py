# SPDX-License-Identifier: Apache-2.0
"""The time of an iteration by how much of a slot is copied to the host at a time."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from megatron_moevement.backends import staging
from megatron_moevement.backends.cuda import CudaCopyStream
from megatron_moevement.runtime.observation.events import EventRecord
from tests.harness.gpu_check.measured_jobs import flags_of, run_measured
from tests.harness.gpu_check.results import Found, Scale


class Between(Enum):
    """What keeps the next piece out of the queue of copies, in which the computation's come."""

    HOST = "host"
    """The copying thread enqueues it when the one before has been copied, as in production."""
    KERNEL = "kernel"
    """It waits on the device for a kernel, and that for the piece before; the host for none."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a slot is copied.

    Attributes:
        size_bytes: of a piece.
    """

    size_bytes: int
    between: Between = Between.HOST


NOTHING = "nothing"
WAYS: Mapping[str, Way] = {
    NOTHING: Way(staging.PIECE_BYTES),
    "a whole slot": Way(1 << 50),
    **{f"{mib} MiB at a time": Way(mib << 20) for mib in (64, 32, 16, 8, 4)},
    **{f"{mib} MiB and a kernel": Way(mib << 20, Between.KERNEL) for mib in (16, 4, 1)},
}
"""By what is enqueued; in this order."""
_ROUNDS = 2
_WARM_UP = 10
_STEPS = {Scale.SMALL: 1, Scale.FULL: 6}
"""Of each way in a round."""


def measure(scale: Scale, folder: Path) -> Found:
    """Runs one job that captures each iteration, in pieces of all sizes in turn."""
    steps = _STEPS[scale]
    last = _WARM_UP + _ROUNDS * len(WAYS) * steps
    flags = (*flags_of(scale), f"--train-iters={last}")
    job = run_measured(folder, "on", flags, warm_up=_WARM_UP, pieces=f"{_WARM_UP}:{steps}")
    return Found({}, job.failures) if job.failures else Found(by_way(job.iterations, steps))


def by_way(iterations: Sequence[EventRecord], steps: int) -> dict[str, str]:
    """Returns medians of an iteration, of its copies and of its stall, by what is copied at a time.

    Args:
        steps: of a way, before the next one.
    """
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in WAYS}
    for number, event in enumerate(iterations):
        found[_name_of(number, steps)].append(event.fields)
    return {
        name: "{:.1f} ms (copies {:.1f}, stall {:.1f})".format(
            *(
                statistics.median(each[figure] for each in fields) * 1e3
                for figure in ("duration_s", "copy_s", "stall_s")
            )
        )
        for name, fields in found.items()
    }


def _name_of(number: int, steps: int) -> str:
    return list(WAYS)[number // steps % len(WAYS)]


def install(first: int, steps: int) -> None:
    """Changes the way of copying while this process trains; copies none where it is NOTHING.

    Args:
        first: iterations before the first way.
        steps: of a way, before the next one.
    """
    from megatron_moevement.training.loop import TrainingLoop  # noqa: PLC0415  (imports Megatron)

    iterate, copy, numbers = TrainingLoop.iterate, staging.Staging.copy, itertools.count(-first)
    wait, name = CudaCopyStream.copy, ""

    def iterate_in_a_way(loop: TrainingLoop) -> Any:
        nonlocal name
        number = next(numbers)
        if number >= 0:
            name = _name_of(number, steps)
            staging.PIECE_BYTES = WAYS[name].size_bytes
        return iterate(loop)

    def copy_unless_nothing(*arguments: Any) -> None:
        if name != NOTHING:
            copy(*arguments)

    def copy_in_a_way(stream: CudaCopyStream, *tensors: Sequence[torch.Tensor]) -> None:
        is_waited_for = name not in WAYS or WAYS[name].between is Between.HOST
        (wait if is_waited_for else KernelsBetween.copy)(stream, *tensors)  # type: ignore[arg-type]

    setattr(TrainingLoop, "iterate", iterate_in_a_way)  # noqa: B010  (mypy: no variables)
    setattr(staging.Staging, "copy", copy_unless_nothing)  # noqa: B010
    setattr(CudaCopyStream, "copy", copy_in_a_way)  # noqa: B010


class KernelsBetween(CudaCopyStream):
    """Enqueues all pieces at once, each behind a kernel that waits for the one before."""

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Returns when all are enqueued."""
        torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            between = torch.zeros(1, device=self._stream.device)
            for piece in staging.pieces(sources, targets):
                self._staging.copy(*piece)
                between.add_(1)
