# SPDX-License-Identifier: Apache-2.0
"""Weight gradients: what a replay leaves out while operators are frozen, and what it can't.

Between the first and the last slot of a window W - 1 steps are replayed. An operator of slot s is
frozen in s of them. Whether that leaves out its weight gradients is a matter of the kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum

from megatron_moevement.policy.job.operators import Inventory, OperatorId, OperatorKind
from megatron_moevement.policy.window.schedule import WindowSchedule


class ExpertKernels(Enum):
    """What a kernel for experts leaves out; each value is a choice of `--expert-kernels`."""

    EACH = "each"
    """The weight gradients of each frozen expert: experts one by one, or grouped on the host."""
    WHOLE = "whole"
    """Those of a layer's experts on a rank, once all of them are frozen: grouped on a GPU."""


@dataclasses.dataclass(frozen=True)
class SkippedGradients:
    """Work on weight gradients in the conversion of one window, all ranks together.

    The unit of work is one FULL byte and one token: with masters and moments of one precision it is
    proportional to FLOPs. In a model with experts theirs is counted, and of it alone.

    Attributes:
        by_step: what is left out in each of the W - 1 replayed steps with frozen operators.
        step_work: what one step takes in training.
    """

    by_step: tuple[float, ...]
    step_work: float

    @property
    def shares(self) -> tuple[float, ...]:
        """What part of its work each step leaves out."""
        return tuple(skipped / (self.step_work or 1) for skipped in self.by_step)

    @property
    def total(self) -> float:
        """What all steps leave out."""
        return sum(self.by_step)

    @property
    def share(self) -> float:
        """What part of their work all steps leave out; 0 without any."""
        return self.total / (len(self.by_step) * self.step_work or 1)


def local_experts(inventory: Inventory) -> tuple[tuple[OperatorId, ...], ...]:
    """Returns the experts of each layer that lie on the same ranks: one grouped GEMM has them."""
    found: list[tuple[OperatorId, ...]] = []
    seen: set[int] = set()
    for listed in inventory.distinct.values():
        by_layer: dict[int | None, list[OperatorId]] = {}
        for one in listed:
            if one.id.kind is OperatorKind.EXPERT and one.id.number not in seen:
                by_layer.setdefault(one.id.layer, []).append(one.id)
                seen.add(one.id.number)
        found += map(tuple, map(sorted, by_layer.values()))
    return tuple(found)


def skipped_gradients(
    schedule: WindowSchedule,
    kernels: ExpertKernels,
    tokens: Mapping[OperatorId, float] | None = None,
) -> SkippedGradients:
    """Returns what a replayed window leaves out of the weight gradients.

    Args:
        tokens: of each expert in a step, those that are missing have none; None: all as many.
    """
    inventory = schedule.inventory
    work = _work(inventory, tokens)
    steps = dict(schedule.slots)
    if kernels is ExpertKernels.WHOLE:
        for together in local_experts(inventory):
            steps.update(dict.fromkeys(together, min(steps[expert] for expert in together)))
    by_last: list[float] = [0] * schedule.window
    for operator, amount in work.items():
        by_last[steps[operator]] += amount
    by_step: list[float] = []
    later: float = 0
    for amount in reversed(by_last[1:]):
        later += amount
        by_step.append(later)
    return SkippedGradients(tuple(reversed(by_step)), sum(by_last))


def _work(
    inventory: Inventory, tokens: Mapping[OperatorId, float] | None
) -> Mapping[OperatorId, float]:
    """Returns what the weight gradients of a step take, for each operator that is counted."""
    weights = _weights(inventory)
    operators = inventory.sorted_operators
    experts = [place for place, one in enumerate(operators) if one.kind is OperatorKind.EXPERT]
    if not experts:
        return dict(zip(operators, weights, strict=True))
    return {
        operators[place]: weights[place]
        * (1 if tokens is None else tokens.get(operators[place], 0))
        for place in experts
    }


def _weights(inventory: Inventory) -> Sequence[int]:
    """Returns the FULL bytes of each operator on all ranks that differ."""
    weights = [0] * len(inventory.numbers)
    for shared in inventory.shared:
        for column in shared.columns:
            for position, full in zip(shared.positions, column.full, strict=True):
                weights[position] += full
    return weights
