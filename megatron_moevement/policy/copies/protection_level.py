# SPDX-License-Identifier: Apache-2.0
"""How protected a job is: what the loss of one process would cost at this moment."""

from __future__ import annotations

import dataclasses
from enum import Enum

from megatron_moevement.policy.job.segments import Ends

UNTIE = "--untie-embeddings-and-output-weights"


class ProtectionLevel(Enum):
    """How many copies stand behind the newest persisted window."""

    FULL = "full"
    """As many as were asked for."""

    REDUCED = "reduced"
    """Fewer, and one at least."""

    NO_COPIES = "no copies"
    """Each slot lies in the memory of its own process alone."""


@dataclasses.dataclass(frozen=True)
class JobShape:
    """What decides the cost of a loss besides copies.

    Attributes:
        wanted: copies that were asked for.
        domains: failure domains of the processes.
        spares: processes that wait to take a place; None where a loss ends the processes of the
            job, and another launch goes on.
    """

    stages: int
    ends: Ends
    wanted: int
    domains: int
    spares: int | None


@dataclasses.dataclass(frozen=True)
class Protection:
    """How protected a job is.

    Attributes:
        copies: the fewest of a slot of the newest persisted window, besides the one of its own
            process; 0 without such a window.
        spares: processes that wait; None where none could come in.
        costs: what a single loss costs beyond the replay of its own stage.
    """

    level: ProtectionLevel
    copies: int
    wanted: int
    spares: int | None
    costs: tuple[str, ...]

    @property
    def line(self) -> str:
        """All of it, for people."""
        copies = "1 copy" if self.copies == 1 else f"{self.copies} copies"
        told = f"{self.level.value}, {copies} of {self.wanted}"
        if self.spares is not None:
            told += f", {self.spares} spare{'' if self.spares == 1 else 's'} left"
        return "; ".join([f"protection: {told}", *self.costs])


def protection_of(shape: JobShape, copies: int) -> Protection:
    """Returns how protected a job is."""
    if copies >= shape.wanted > 0:
        level = ProtectionLevel.FULL
    else:
        level = ProtectionLevel.REDUCED if copies else ProtectionLevel.NO_COPIES
    costs = (_cost_of_memory(shape, level), _cost_of_place(shape), _cost_of_scope(shape))
    told = tuple(cost for cost in costs if cost)
    return Protection(level, copies, shape.wanted, shape.spares, told)


def _cost_of_memory(shape: JobShape, level: ProtectionLevel) -> str:
    if level is ProtectionLevel.NO_COPIES and shape.wanted:
        alone = ", all processes are one failure domain" if shape.domains == 1 else ""
        return f"a loss with its memory goes back to the durable checkpoint{alone}"
    if level is ProtectionLevel.NO_COPIES:
        return "a loss with its memory goes back to the durable checkpoint (--moevement-replicas 0)"
    if shape.domains <= shape.wanted:
        return f"{shape.domains} failure domains have no room for {shape.wanted} copies"
    return ""


def _cost_of_place(shape: JobShape) -> str:
    if shape.spares is None:
        return "a loss ends the job until it is launched again"
    return "" if shape.spares else "a loss stops the job with exit code 75 until it is launched"


def _cost_of_scope(shape: JobShape) -> str:
    if shape.stages == 1:
        return "a loss has all ranks replay (one stage)"
    return tied_ends(shape.stages, shape.ends)


def tied_ends(stages: int, ends: Ends) -> str:
    """Returns what tied embeddings cost in a recovery; nothing where they cost nothing."""
    if ends is not Ends.TIED or stages == 1:
        return ""
    if stages == 2:
        return f"any loss has both stages replay: they share the embedding ({UNTIE} changes it)"
    return (
        "a loss in the first or the last stage has both replay: they share the embedding "
        f"({UNTIE} changes it)"
    )
