# SPDX-License-Identifier: Apache-2.0
"""Fault points: a process passes them on its way through a step, and fails at one when it is told.

What is to be shown of a recovery depends on the instruction at which a process fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from megatron_moevement.runtime.faults.fault_effects import inflict
from megatron_moevement.settings.faults import Fault, FaultPoint

logger = logging.getLogger(__name__)

Strike = Callable[[FaultPoint], None]
"""Passes a fault point of a step that the caller knows."""

Witness = Callable[[Fault], None]
"""Is told that a fault strikes now; what it wants to keep it must write at once."""


def pass_by(place: FaultPoint) -> None:
    """Passes a fault point at which nothing happens."""
    del place


class FaultPoints:
    """The scripted faults of one process; any thread passes fault points.

    A fault belongs to one generation, strikes a rank once, and is known afterwards: in this process
    here, to the next launch by what witnesses wrote. A process that takes a rank over lives in
    a later generation, so it is not struck again.
    """

    def __init__(self, faults: Iterable[Fault] = (), rank: int = 0) -> None:
        """Arms the faults of the first generation; without any, nothing ever happens."""
        self._scripted = tuple(faults)
        self._rank = rank
        self._witness: Witness = lambda fault: None
        self._armed: dict[tuple[int, FaultPoint], Fault] = {}
        self._spared: set[Fault] = set()
        self._known: frozenset[str] = frozenset()
        self._first: int | None = None
        self.step = 0
        """The step that was begun last."""
        self.enter(0)

    def enter(self, generation: int) -> None:
        """Arms the faults of a generation and no others."""
        self._generation = generation
        self._armed = {
            (fault.step, fault.place): fault
            for fault in self._scripted
            if fault.strikes(self._rank) and fault.generation == generation
        }

    def know(self, struck: Iterable[str]) -> None:
        """Disarms faults that struck before, in a former launch."""
        self._known |= frozenset(struck)
        armed = self._armed.items()
        self._armed = {where: one for where, one in armed if str(one) not in self._known}
        self._spared = {fault for fault in self._spared if str(fault) not in self._known}

    def begin_at(self, step: int) -> None:
        """Is told from which state training goes on in this generation.

        From here on this process answers for the generation's faults. What lies behind the
        earliest state need not strike.
        """
        first = step + 1 if step else 0
        self._first = first if self._first is None else min(self._first, first)
        self._spared.update(self._armed.values())

    def tell(self, witness: Witness) -> None:
        """Names who is told of a fault just before it strikes, on the thread that it strikes."""
        self._witness = witness

    def strike(self, step: int, place: FaultPoint) -> None:
        """Fails if a fault is armed for this place of this step.

        Raises:
            InjectedFaultError: that is the fault.
            SystemExit: that is the fault.
        """
        fault = self._armed.pop((step, place), None)
        if fault is None:
            return
        self._spared.discard(fault)
        self._witness(fault)
        logger.warning("--moevement-faults: %s", fault)
        inflict(fault.kind)

    def strike_outside(self, place: FaultPoint) -> None:
        """Fails as `strike` does if a fault is armed for this place, which lies in no step."""
        steps = [step for step, armed in list(self._armed) if armed is place]
        if steps:
            self.strike(min(steps), place)

    def of_step(self, step: int) -> Strike:
        """Begins a step; returns what passes its fault points."""
        self.step = step
        return lambda place: self.strike(step, place)

    def spared(self, committed: int) -> frozenset[str]:
        """Returns the faults that should have struck this process by now and have not.

        A fault is due when its step lies between where this process began and where it has come to,
        and this process trained in its generation, or that never came.
        """
        never = {fault for fault in self._scripted if fault.generation > self._generation}
        due = (
            str(fault)
            for fault in self._spared | never
            if (self._first or 0) <= fault.step <= committed
        )
        return frozenset(due) - self._known


NO_FAULTS = FaultPoints()


def never_struck(
    faults: Iterable[Fault], spared: Iterable[tuple[int, Iterable[str]]], world_size: int
) -> list[str]:
    """Returns the faults that struck nobody.

    The ranks of a fault are lost together: when one is gone, the others may be interrupted before
    they come to the place. So it struck if any of them was. A process that is gone can't say that
    it was spared.

    Args:
        spared: for each process its rank, and what should have struck it and has not.
    """
    says = {(rank, name) for rank, names in spared for name in names}
    return [
        str(fault)
        for fault in faults
        if all((rank, str(fault)) in says for rank in range(world_size) if fault.strikes(rank))
    ]
