# SPDX-License-Identifier: Apache-2.0
"""The time of an iteration by the size of the pieces in which slots are copied to the host."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_moevement.backends import staging
from megatron_moevement.runtime.observation.events import EventRecord
from tests.harness.gpu_check.measured_jobs import flags_of, run_measured
from tests.harness.gpu_check.results import Found, Scale

NOTHING = "nothing"
SIZES: Mapping[str, int] = {
    NOTHING: staging.PIECE_BYTES,
    "a whole slot": 1 << 50,
    **{f"{mib} MiB": mib << 20 for mib in (64, 32, 16, 8, 4)},
}
"""Bytes of a piece, by what is copied at a time; in this order."""
_ROUNDS = 2
_WARM_UP = 10
_STEPS = {Scale.SMALL: 1, Scale.FULL: 6}
"""Of each size in a round."""


def measure(scale: Scale, folder: Path) -> Found:
    """Runs one job that captures each iteration, in pieces of all sizes in turn."""
    steps = _STEPS[scale]
    last = _WARM_UP + _ROUNDS * len(SIZES) * steps
    flags = (*flags_of(scale), f"--train-iters={last}")
    job = run_measured(folder, "on", flags, warm_up=_WARM_UP, pieces=f"{_WARM_UP}:{steps}")
    return Found({}, job.failures) if job.failures else Found(by_size(job.iterations, steps))


def by_size(iterations: Sequence[EventRecord], steps: int) -> dict[str, str]:
    """Returns medians of an iteration, of its copies and of its stall, by what is copied at a time.

    Args:
        steps: of a size, before the next one.
    """
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in SIZES}
    for number, event in enumerate(iterations):
        found[_size_of(number, steps)].append(event.fields)
    return {
        f"{name} at a time": "{:.1f} ms (copies {:.1f}, stall {:.1f})".format(
            *(
                statistics.median(each[figure] for each in fields) * 1e3
                for figure in ("duration_s", "copy_s", "stall_s")
            )
        )
        for name, fields in found.items()
    }


def _size_of(number: int, steps: int) -> str:
    return list(SIZES)[number // steps % len(SIZES)]


def install(first: int, steps: int) -> None:
    """Changes the size of pieces while this process trains; copies none where it is NOTHING.

    Args:
        first: iterations before the first size.
        steps: of a size, before the next one.
    """
    from megatron_moevement.training.loop import TrainingLoop  # noqa: PLC0415  (imports Megatron)

    iterate, copy, numbers = TrainingLoop.iterate, staging.Staging.copy, itertools.count(-first)
    size = ""

    def iterate_with_size(loop: TrainingLoop) -> Any:
        nonlocal size
        number = next(numbers)
        if number >= 0:
            size = _size_of(number, steps)
            staging.PIECE_BYTES = SIZES[size]
        return iterate(loop)

    def copy_unless_nothing(*arguments: Any) -> None:
        if size != NOTHING:
            copy(*arguments)

    setattr(TrainingLoop, "iterate", iterate_with_size)  # noqa: B010  (mypy: no variables)
    setattr(staging.Staging, "copy", copy_unless_nothing)  # noqa: B010
