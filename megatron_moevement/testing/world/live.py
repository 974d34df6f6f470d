# SPDX-License-Identifier: Apache-2.0
"""Live state: what a rank trains on, and what of it a sparse snapshot holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.testing.world.values import History


@dataclasses.dataclass(frozen=True)
class SlotContent:
    """What one sparse snapshot of one rank holds.

    Attributes:
        full: FULL of the operators of this slot.
        compute: COMPUTE of the operators of later slots.
        bias: the buffers that go with either.
        scalers: loss scalers of the dense and of the expert optimizer.
        cursor: consumed samples and random streams.
    """

    full: Mapping[OperatorId, int]
    compute: Mapping[OperatorId, int]
    bias: Mapping[OperatorId, int]
    scalers: tuple[int, ...]
    cursor: int


@dataclasses.dataclass
class Live:
    """The state of one rank; S_step once a commit has ended.

    Attributes:
        step: k.
        active: FULL of the operators that are trained.
        frozen: COMPUTE of those that wait for their slot.
        bias: `expert_bias` of each gate.
        scalers: loss scalers of the dense and of the expert optimizer.
        cursor: consumed samples and random streams.
        window: the window that is being converted, None when all operators are active.
        torn: whether a commit began and did not end.
    """

    step: int
    active: dict[OperatorId, int]
    frozen: dict[OperatorId, int]
    bias: dict[OperatorId, int]
    scalers: list[int]
    cursor: int
    window: Window | None = None
    torn: bool = False

    def copy(self) -> Live:
        """Returns an independent copy."""
        return dataclasses.replace(
            self,
            active=dict(self.active),
            frozen=dict(self.frozen),
            bias=dict(self.bias),
            scalers=list(self.scalers),
        )

    def capture(
        self, history: History, full: Collection[OperatorId], compute: Collection[OperatorId]
    ) -> SlotContent:
        """Returns a sparse snapshot: FULL of some operators and COMPUTE of others.

        Raises:
            KeyError: an operator of either is frozen.
        """
        gates = [operator for operator in (*full, *compute) if operator.kind is OperatorKind.GATE]
        return SlotContent(
            full={operator: self.active[operator] for operator in full},
            compute={
                operator: history.of("compute", self.active[operator]) for operator in compute
            },
            bias={gate: self.bias[gate] for gate in gates},
            scalers=tuple(self.scalers),
            cursor=self.cursor,
        )

    def load(self, content: SlotContent, full: Collection[OperatorId]) -> None:
        """Activates the operators that are FULL in a slot and refreshes those that stay frozen."""
        for operator in full:
            self.frozen.pop(operator, None)
            self.active[operator] = content.full[operator]
        self.frozen.update(content.compute)
        self.bias.update(content.bias)

    @classmethod
    def of_first_slot(
        cls, content: SlotContent, window: Window, full: Collection[OperatorId]
    ) -> Live:
        """Returns the state that a replay of a window begins with."""
        live = cls(window.start, {}, {}, {}, list(content.scalers), content.cursor, window)
        live.load(content, full)
        return live
