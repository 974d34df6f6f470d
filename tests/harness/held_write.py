# SPDX-License-Identifier: Apache-2.0
"""Writers of checkpoints that wait before they write, as on a slow disk, until they may."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

_LOOK_S = 0.005


def steps_begun(job: Any, then: Callable[[int], object]) -> list[int]:
    """Returns a list that gets the number of each step that a job begins.

    Args:
        then: is called in each step.
    """
    begun: list[int] = []
    forward_backward = job.schedule.forward_backward

    def noted(*arguments: Any) -> Any:
        step = int(arguments[-1])
        begun.append(step)
        then(step)
        return forward_backward(*arguments)

    job.schedule.forward_backward = noted
    return begun


def hold_first_write(begun: list[int], step: int | None) -> list[int]:
    """Lets the first write of this process wait until a step has begun.

    Args:
        begun: the steps that have.
        step: None: until the training thread waits for the write.

    Returns:
        A list that gets a number when a write is over.
    """
    from megatron_moevement.training.background_write import BackgroundWrite  # noqa: PLC0415
    from megatron_moevement.training.checkpoint_saving import BegunSave  # noqa: PLC0415

    write, wait, run = BegunSave.write, BackgroundWrite.wait, BackgroundWrite._run  # noqa: SLF001
    writes = itertools.count()
    waits: list[int] = []
    over: list[int] = []

    def held(self: BegunSave, data: Any, proceed: Callable[[], None] = lambda: None) -> Any:
        if next(writes) == 0:
            while not (waits if step is None else max(begun, default=0) >= step):
                proceed()
                time.sleep(_LOOK_S)
        return write(self, data, proceed)

    def noted(self: BackgroundWrite, beat: Callable[[], None]) -> None:
        if not self.is_over:
            waits.append(1)
        wait(self, beat)

    def ended(self: BackgroundWrite, data: Any) -> None:
        run(self, data)
        over.append(len(over))

    BegunSave.write, BackgroundWrite.wait = held, noted  # type: ignore[method-assign]
    BackgroundWrite._run = ended  # type: ignore[method-assign]  # noqa: SLF001
    return over


def await_end(over: list[int]) -> None:
    """Waits until a write is over."""
    while not over:
        time.sleep(_LOOK_S)
