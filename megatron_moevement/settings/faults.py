# SPDX-License-Identifier: Apache-2.0
"""Scripted faults: what happens to which ranks at which instruction of which step.

`7:barrier` kills every process in front of the commit barrier of step 7, `7:commit@0,2` ranks 0 and
2 when they have entered the commit section. `stop:9:replay@1#2` stops rank 1 in step 9, once the
job was restarted twice in place.
"""

from __future__ import annotations

import dataclasses
import re
from enum import Enum

from megatron_moevement.policy.faults.fault_schedule import FaultKind

_SPEC = re.compile(
    r"((?P<kind>[a-z]+):)?(?P<step>\d+):(?P<place>[a-z-]+)"
    r"(@(?P<ranks>\d+(,\d+)*))?(#(?P<generation>\d+))?"
)
_FORM = "[KIND:]STEP:PLACE[@RANKS][#GENERATION]"


class FaultPoint(Enum):
    """A place in a step where a fault can strike.

    The step is k where S_(k-1) becomes S_k, ordinary or replayed. A slot belongs to the step whose
    state it captures. The places from `connect` on lie in a start or a recovery, not in a step:
    there a fault strikes when its generation first comes to the place.
    """

    FORWARD = "forward"
    """Before the forward pass of a micro-batch in the middle."""
    FORWARD_BACKWARD = "forward-backward"
    """Between forward and backward of a micro-batch in the middle."""
    BOUNDARY_SEND = "boundary-send"
    """After that forward pass, before the next tensor is sent over a stage boundary."""
    BACKWARD = "backward"
    """At the beginning of the backward pass of that micro-batch."""
    FINALIZE = "finalize"
    """Before the gradients are reduced over the stage."""
    AFTER_FINALIZE = "after-finalize"
    PREPARE = "prepare"
    """Before the gradients are unscaled and their norm is computed."""
    BARRIER = "barrier"
    """In front of the commit barrier."""
    AFTER_BARRIER = "after-barrier"
    COMMIT = "commit"
    """In the commit section, before the optimizers."""
    OPTIMIZERS = "optimizers"
    """Between the first optimizer and what follows it; not in a step that overflowed."""
    AFTER_OPTIMIZERS = "after-optimizers"
    LEDGER = "ledger"
    """Before the journal holds the step."""
    COMMITTED = "committed"
    """Once the journal holds the step."""
    GATHER = "gather"
    """After the commit, before the parameters are gathered."""
    WINDOW_EDGE = "window-edge"
    """Behind the commit of a step that begins a window, before its first slot is begun."""
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
    SAVE = "save"
    """When the files of a durable checkpoint are written, before it has its name."""
    CONNECT = "connect"
    """Between joining the job and connecting to the groups of a generation."""
    START = "start"
    """Before the store is opened, at the start of a generation."""
    FACTS = "facts"
    """Before a process publishes what it has."""
    PLAN = "plan"
    """When all have the plan of a recovery, before anything of it is carried out."""
    OPEN = "open"
    """When a process serves its memory, before its peers have the address."""
    ROLL_FORWARD = "roll-forward"
    """In a recovery: in the commit of a survivor that was a step behind, after the optimizers; the
    places of a commit are passed, too."""
    REPROTECT = "reprotect"
    """In a recovery: while slots are sent to holders that lack them."""
    REJOIN = "rejoin"
    """In a recovery: before the meeting with all ranks, after which training goes on."""
    SERVE_SLOT = "serve-slot"
    """When half of a slot was sent to a process that asked for it."""
    SERVE_LOG = "serve-log"
    """When half of a logged tensor was sent to a process that asked for it."""
    SERVE_STATE = "serve-state"
    """When half of a part of the live state was sent to a process that asked for it."""

    @property
    def is_of_step(self) -> bool:
        """Whether it lies in a step; the others are passed whatever the step is."""
        return self not in _OF_NO_STEP


_OF_NO_STEP = frozenset(list(FaultPoint)[list(FaultPoint).index(FaultPoint.CONNECT) :])


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to processes, and where.

    Attributes:
        step: k; where the place lies in no step, the step by which it has struck.
        ranks: the logical ranks that are lost together; None: all of them.
        generation: restarts of the job in place that lie behind it.
    """

    step: int
    place: FaultPoint
    ranks: frozenset[int] | None = None
    generation: int = 0
    kind: FaultKind = FaultKind.KILL

    @classmethod
    def parse(cls, spec: str) -> Fault:
        """Reads `[KIND:]STEP:PLACE[@RANK,RANK...][#GENERATION]`; KIND is `kill` if not given.

        Raises:
            ValueError: it is none.
        """
        found = _SPEC.fullmatch(spec)
        if found is None:
            raise ValueError(f"{spec!r} is not {_FORM}, as in 7:barrier or stop:7:commit@0,2#1")
        kinds = {kind.value: kind for kind in FaultKind}
        kind = found["kind"] or FaultKind.KILL.value
        if kind not in kinds:
            raise ValueError(f"{spec!r} names no fault: {kind}; there are {', '.join(kinds)}")
        places = {place.value: place for place in FaultPoint}
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
            kinds[kind],
        )

    def __str__(self) -> str:
        ranks = "" if self.ranks is None else "@" + ",".join(map(str, sorted(self.ranks)))
        where = f"{self.step}:{self.place.value}{ranks}"
        return f"{self.kind.value}:{where}" + (f"#{self.generation}" if self.generation else "")

    def strikes(self, rank: int) -> bool:
        """Returns whether it strikes a logical rank."""
        return self.ranks is None or rank in self.ranks
