# SPDX-License-Identifier: Apache-2.0
"""Lifecycle: what a process of a generation does now, what may come next, and in which order."""

from __future__ import annotations

from enum import Enum

from megatron_moevement.errors import MoEvementError


class IllegalEventError(MoEvementError, RuntimeError):
    """An event that can't happen in a phase: the order of a recovery is broken."""


class Phase(Enum):
    """What a process does; one of them at any time."""

    PLANNING = "planning"
    """A generation begins: its processes gather facts and make a plan."""

    LOADING = "loading"
    """Nothing was brought back: a durable checkpoint is loaded, or training begins."""

    SETTLING = "settling"
    """The process comes to the target of the plan: roll forward, reset, journal."""

    RESTORING = "restoring"
    """Slots are fetched, and lost states are copied from replicas."""

    REPLAYING = "replaying"
    STANDING_BY = "standing by"
    """The state stands; the process serves those that replay."""

    REJOINING = "rejoining"
    """The target is reached: copies are made, and all ranks wait for each other."""

    TRAINING = "training"
    PAUSED = "paused"
    """Between two steps the job evaluates or saves."""

    ENDING = "ending"

    @property
    def makes_steps(self) -> bool:
        """Whether steps follow each other, so that a silence is a hang."""
        return self in {Phase.REPLAYING, Phase.TRAINING}


class Event(Enum):
    """What happens to a process."""

    AGREED = "all ranks have the same plan"
    LOADS = "a durable state is to be loaded"
    SETTLED = "the process is at the target, or has given its state up"
    REPLAYS = "steps up to the target are lacking"
    STANDS_BY = "no step is lacking"
    REACHED = "the target is reached"
    BEGINS = "training goes on, or begins"
    PAUSES = "an evaluation or a save is due"
    ENDS = "the job ends"


class Action(Enum):
    """What a rank does to carry out a plan, in this order, before steps are replayed.

    A fault may come between any two. Who is a step behind applies it while its gradients are there.
    Who goes back to a window has given its state up before they are gone: one that stands and can't
    follow would break the next plan. Who is new may have found a journal that knows a step more
    than the job, until its own is written. What was loaded counts after all that: the next plan
    would go on from it, and in the windows of before, which some ranks have removed and others not.
    """

    ROLL_FORWARD = "apply the step that it lacks, if it goes on from there"
    GIVE_UP = "give up its state, if it replays from elsewhere"
    RESET = "reset what an interrupted step leaves behind; the finished gradients are gone"
    JOURNAL = "write what the job has committed into the journal"
    BELONG = "count as one who was there, no longer as new"
    TAKE_LOADED = "count the state that was loaded as its own, if it replays from there"
    SETTLE = "enter the next phase: it is at the target, or has given its state up"
    OFFER = "let who lost its state copy that of this rank; until all do, sources roll forward"
    FETCH = "bring the slots that it lacks into its ring"
    COPY = "take the state that it lacks from a replica, if the plan has one for it"
    STAND_BY = "derive what it trains on from the state that it keeps or has copied"
    AWAIT_ALL = "wait for all: no rank overwrites what another one still fetches or copies"


_NEXT = {
    (Phase.PLANNING, Event.AGREED): Phase.SETTLING,
    (Phase.PLANNING, Event.LOADS): Phase.LOADING,
    (Phase.LOADING, Event.AGREED): Phase.SETTLING,
    (Phase.LOADING, Event.BEGINS): Phase.TRAINING,
    (Phase.SETTLING, Event.SETTLED): Phase.RESTORING,
    (Phase.RESTORING, Event.REPLAYS): Phase.REPLAYING,
    (Phase.RESTORING, Event.STANDS_BY): Phase.STANDING_BY,
    (Phase.REPLAYING, Event.REACHED): Phase.REJOINING,
    (Phase.STANDING_BY, Event.REACHED): Phase.REJOINING,
    (Phase.REJOINING, Event.BEGINS): Phase.TRAINING,
    (Phase.TRAINING, Event.PAUSES): Phase.PAUSED,
    (Phase.PAUSED, Event.BEGINS): Phase.TRAINING,
    (Phase.TRAINING, Event.ENDS): Phase.ENDING,
}


def advance(phase: Phase, event: Event) -> Phase:
    """Returns what a process does after an event.

    A restart is no event: the next generation begins with `Phase.PLANNING`.

    Raises:
        IllegalEventError: the event can't happen in that phase.
    """
    following = _NEXT.get((phase, event))
    if following is None:
        raise IllegalEventError(f"{event.name} can't happen while a process is {phase.value}")
    return following
