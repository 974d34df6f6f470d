# SPDX-License-Identifier: Apache-2.0
"""What happened since the last iteration line, as Megatron counts it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import timedelta

LM_LOSS = "lm loss"


@dataclasses.dataclass(frozen=True)
class WantedTotals:
    """Which totals a step computes; the same on every rank, and none in a step of some ranks."""

    num_zeros: bool = False
    params_norm: bool = False


@dataclasses.dataclass(frozen=True)
class Totals:
    """Numbers over the whole model, where they were asked for.

    Attributes:
        num_zeros: elements of the gradients that are zero; None when the gradients overflowed.
        params_norm: L2 norm of the weights after the step.
    """

    num_zeros: int | None = None
    params_norm: float | None = None

    def scalars(self) -> dict[str, float]:
        """Returns those that there are, by Megatron's names."""
        named = {"num-zeros": self.num_zeros, "params-norm": self.params_norm}
        return {name: value for name, value in named.items() if value is not None}


NO_TOTALS = Totals()
NONE_WANTED = WantedTotals()


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one committed step reports, the same numbers on every rank.

    Attributes:
        iteration: k of the step.
        consumed_samples: samples read up to and with this step.
        auxiliary_losses: losses of the routers by name, where they were collected in this step.
        learning_rate: None on a rank that trains no parameter.
        grad_norm: None when the gradients overflowed.
        is_skipped: whether the step overflowed and changed no weight.
    """

    iteration: int
    consumed_samples: int
    duration: timedelta
    loss: float
    auxiliary_losses: Mapping[str, float]
    learning_rate: float | None
    loss_scale: float
    grad_norm: float | None
    is_skipped: bool
    totals: Totals = NO_TOTALS

    def losses(self) -> dict[str, float]:
        """Returns all losses by their names in lines and scalars."""
        return {LM_LOSS: self.loss, **self.auxiliary_losses}


class Interval:
    """The steps since the last line; used by the training thread.

    A step that is reported again, after a restart, replaces what was reported for it.
    """

    def __init__(self) -> None:
        self._steps: dict[int, StepReport] = {}

    def add(self, step: StepReport) -> None:
        """Adds one step."""
        self._steps[step.iteration] = step

    def clear(self) -> None:
        """Starts a new interval."""
        self._steps.clear()

    @property
    def newest(self) -> StepReport:
        """The step of the highest iteration."""
        return self._steps[max(self._steps)]

    @property
    def elapsed_per_iteration(self) -> timedelta:
        """Mean duration of the steps, skipped ones included."""
        return sum((step.duration for step in self._steps.values()), timedelta()) / len(self._steps)

    @property
    def skipped(self) -> int:
        """Number of steps that overflowed."""
        return sum(step.is_skipped for step in self._steps.values())

    @property
    def nans(self) -> int:
        """Number of skipped steps with a loss that is no finite number."""
        return sum(
            step.is_skipped and not all(math.isfinite(loss) for loss in step.losses().values())
            for step in self._steps.values()
        )

    def mean_losses(self) -> dict[str, float]:
        """Returns each loss averaged over the steps that reported it and were not skipped.

        A loss of skipped steps alone has the mean 0.
        """
        values: dict[str, list[float]] = {}
        for iteration in sorted(self._steps):
            step = self._steps[iteration]
            for name, loss in step.losses().items():
                counted = values.setdefault(name, [])
                if not step.is_skipped:
                    counted.append(loss)
        return {name: sum(found) / max(1, len(found)) for name, found in values.items()}
