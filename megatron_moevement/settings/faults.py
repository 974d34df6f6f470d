"""Faults on purpose: at which instruction of which step a process kills itself.

`7:barrier` kills every process in front of the commit barrier of step 7, `7:commit@0,2` ranks 0 and
2 when they have entered the commit section. A fault strikes in the first generation of a job,
`7:fetch@2#1` in the one after the first in-process restart.
"""

from __future__ import annotations

import dataclasses
import re
from enum import Enum

from megatron_moevement.policy.commit import Command

_SPEC = re.compile(
    r"(?P<step>\d+):(?P<place>[a-z-]+)(@(?P<ranks>\d+(,\d+)*))?(#(?P<generation>\d+))?"
)


def _command(command: Command) -> str:
    return command.name.lower().replace("_", "-")


class Place(Enum):
    """A place in a step where a process can be killed; commands have their names in the policy.

    The step is k where S_(k-1) becomes S_k, ordinary or replayed. A slot belongs to the step whose
    state it captures.
    """

    FORWARD_BACKWARD = _command(Command.FORWARD_BACKWARD)
    """Between forward and backward of a micro-batch in the middle."""
    FINALIZE = _command(Command.FINALIZE)
    """Before the gradients are reduced over the stage."""
    AFTER_FINALIZE = "after-finalize"
    PREPARE = _command(Command.PREPARE)
    """Before the gradients are unscaled and their norm is computed."""
    BARRIER = _command(Command.BARRIER)
    """In front of the commit barrier."""
    AFTER_BARRIER = "after-barrier"
    COMMIT = _command(Command.COMMIT)
    """In the commit section, before the optimizers."""
    OPTIMIZERS = _command(Command.OPTIMIZERS)
    """Between the first optimizer and what follows it; not in a step that overflowed."""
    AFTER_OPTIMIZERS = "after-optimizers"
    LEDGER = _command(Command.LEDGER)
    """Before the journal holds the step."""
    COMMITTED = _command(Command.COMMITTED)
    """Once the journal holds the step."""
    GATHER = "gather"
    """After the commit, before the parameters are gathered."""
    CAPTURE = "capture"
    """When the buffer of the slot is invalid, before the first copy."""
    COPY = "copy"
    """In the middle of the copies of a slot."""
    PUBLISH = "publish"
    """When a slot has landed, before it is published."""
    AFTER_PUBLISH = "after-publish"
    """Before the slot is sent to anybody."""
    SEND = "send"
    """When half of a slot was sent to a peer."""
    FETCH = "fetch"
    """In a recovery: when the slot has arrived from a peer, before it is published here."""
    REPLAY = "replay"
    """In a recovery: after a replayed step, before its slot is put back."""
    DENSE = "dense"
    """In a recovery: when the last slot of the window is put back."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Where processes kill themselves.

    Attributes:
        step: k.
        place: in the step.
        ranks: places of the processes in the job; None: all of them.
        generation: in-process restarts before it.
    """

    step: int
    place: Place
    ranks: frozenset[int] | None = None
    generation: int = 0

    @classmethod
    def parse(cls, spec: str) -> Fault:
        """Reads `STEP:PLACE[@RANK,RANK...][#GENERATION]`.

        Raises:
            ValueError: it is none.
        """
        found = _SPEC.fullmatch(spec)
        if found is None:
            raise ValueError(f"{spec!r} is not STEP:PLACE[@RANK,RANK...][#GENERATION]")
        places = {place.value: place for place in Place}
        if found["place"] not in places:
            raise ValueError(
                f"{spec!r} names no place of a step: {found['place']}; there are "
                f"{', '.join(places)}"
            )
        ranks = found["ranks"]
        return cls(
            int(found["step"]),
            places[found["place"]],
            None if ranks is None else frozenset(int(rank) for rank in ranks.split(",")),
            int(found["generation"] or 0),
        )

    def strikes(self, rank: int) -> bool:
        """Returns whether it kills the process in a place of the job."""
        return self.ranks is None or rank in self.ranks
