# SPDX-License-Identifier: Apache-2.0
"""State recipes: what an optimizer keeps of each parameter, and what snapshots hold of it.

Source: section 3.2 of the paper.
"""

from __future__ import annotations

import dataclasses
from enum import Enum


class Content(Enum):
    """What a snapshot holds of an operator."""

    FULL = "full"
    """What it is trained on."""
    COMPUTE = "compute"
    """What it is computed with."""


class Timing(Enum):
    """When a tensor may be read after the commit of the step that made it."""

    UNTIL_NEXT_COMMIT = "until the next commit"
    AT_ONCE = "at once"
    """Forward, backward or finalize change it: small buffers."""


class NumberType(Enum):
    """The type of a tensor's elements, by torch's name."""

    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"

    @property
    def size_bytes(self) -> int:
        """Bytes of an element."""
        return 4 if self is NumberType.FP32 else 2


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A tensor that is kept of each parameter.

    Attributes:
        key: its name in the optimizer's state.
        held_as: its type, in which FULL holds it.
    """

    key: str
    held_as: NumberType = NumberType.FP32
    timing: Timing = Timing.UNTIL_NEXT_COMMIT


@dataclasses.dataclass(frozen=True)
class StateRecipe:
    """What is kept of each parameter, and nothing else is; by default that of Adam in FP32.

    A snapshot is put back into the tensors that it was captured from: COMPUTE fills the master
    weights with what the compute weights are cast from, and the cast of all masters follows.

    Attributes:
        compute: the type of the compute weights, which are cast from the master weights.
        moments: what the optimizer keeps besides; zeros before the first step.
        counter: key of the step counter. It is the same for all operators of a committed state and
            goes with the scalars.
    """

    compute: NumberType
    master: StateTensor = StateTensor("master")
    moments: tuple[StateTensor, ...] = (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))
    counter: str = "step"

    def captured(self, content: Content) -> tuple[StateTensor, ...]:
        """Returns the tensors that a snapshot holds, in the types that it holds them in."""
        if content is Content.FULL:
            return (self.master, *self.moments)
        return (dataclasses.replace(self.master, held_as=self.compute),)

    def bytes_per_parameter(self, content: Content) -> int:
        """Returns what a snapshot holds of each parameter."""
        return sum(tensor.held_as.size_bytes for tensor in self.captured(content))


RECIPES = {compute: StateRecipe(compute) for compute in NumberType}
"""By the type of the compute weights."""
