"""Lifecycle: in which phase a process is, and which events lead from one to the next."""

from __future__ import annotations

import dataclasses
from enum import Enum

from megatron_moevement.policy.plan import Plan, Verdict
from megatron_moevement.policy.ranks import LogicalRank


class Phase(Enum):
    """What a process is doing; one of them at any time."""

    STARTING = "starting"
    STANDBY = "standby"
    TRAINING = "training"
    GATHERING = "gathering facts"
    SETTLING = "rolling forward and resetting transients"
    FETCHING = "fetching slots"
    REPLAYING = "replaying"
    SERVING = "serving logs and slots"
    LOADING = "loading a durable checkpoint"
    PROTECTING = "copying slots that are in danger"
    FLUSHING = "writing its store for the next launch"
    ENDED = "ended"


class Event(Enum):
    """What happens to a process."""

    STARTED = "started with a rank"
    STARTED_SPARE = "started as a spare"
    INTERRUPTED = "interrupted: a new generation begins"
    AGREED = "has a plan that all agree on"
    STANDS = "its state stands, nobody replays"
    SERVES = "its state stands, others replay"
    REPLAYS = "its stage replays"
    LOADS = "everybody loads a durable checkpoint"
    FLUSHES = "the job ends and its state is written"
    GIVES_UP = "the job ends and there is nothing to write"
    FETCHED = "has its slots"
    REPLAYED = "reached the target"
    SERVED = "nobody needs its logs any more"
    LOADED = "loaded the durable checkpoint"
    PROTECTED = "no slot is in danger; it occupies a rank"
    PROTECTED_SPARE = "no slot is in danger; it is a spare"
    FLUSHED = "its store is written"
    FINISHED = "the last step is committed"


class IllegalEventError(RuntimeError):
    """An event that can't happen in the phase: the process is not where it believes to be."""


_NEXT: dict[tuple[Phase, Event], Phase] = {
    (Phase.STARTING, Event.STARTED): Phase.TRAINING,
    (Phase.STARTING, Event.STARTED_SPARE): Phase.STANDBY,
    (Phase.GATHERING, Event.AGREED): Phase.SETTLING,
    (Phase.SETTLING, Event.STANDS): Phase.PROTECTING,
    (Phase.SETTLING, Event.SERVES): Phase.SERVING,
    (Phase.SETTLING, Event.REPLAYS): Phase.FETCHING,
    (Phase.SETTLING, Event.LOADS): Phase.LOADING,
    (Phase.SETTLING, Event.FLUSHES): Phase.FLUSHING,
    (Phase.SETTLING, Event.GIVES_UP): Phase.ENDED,
    (Phase.FETCHING, Event.FETCHED): Phase.REPLAYING,
    (Phase.REPLAYING, Event.REPLAYED): Phase.PROTECTING,
    (Phase.SERVING, Event.SERVED): Phase.PROTECTING,
    (Phase.LOADING, Event.LOADED): Phase.PROTECTING,
    (Phase.PROTECTING, Event.PROTECTED): Phase.TRAINING,
    (Phase.PROTECTING, Event.PROTECTED_SPARE): Phase.STANDBY,
    (Phase.FLUSHING, Event.FLUSHED): Phase.ENDED,
    (Phase.TRAINING, Event.FINISHED): Phase.ENDED,
    (Phase.STANDBY, Event.FINISHED): Phase.ENDED,
}
_NEXT |= {
    (phase, Event.INTERRUPTED): Phase.GATHERING for phase in Phase if phase is not Phase.ENDED
}


@dataclasses.dataclass(frozen=True)
class Lifecycle:
    """Where a process is.

    Attributes:
        phase: what it is doing.
        generation: the generation that it is part of.
    """

    phase: Phase = Phase.STARTING
    generation: int = 0


def advance(state: Lifecycle, event: Event, generation: int | None = None) -> Lifecycle:
    """Returns where a process is after an event.

    Args:
        state: where it was.
        event: what happened.
        generation: the new generation, with an interrupt only.

    Raises:
        IllegalEventError: the event can't happen here, or the generation is not a later one.
    """
    phase = _NEXT.get((state.phase, event))
    if phase is None:
        raise IllegalEventError(f"{event.name} can't happen to a process in {state.phase.name}")
    if (event is Event.INTERRUPTED) != (generation is not None):
        raise IllegalEventError("an interrupt, and nothing else, begins a generation")
    if generation is None:
        return dataclasses.replace(state, phase=phase)
    if generation <= state.generation:
        raise IllegalEventError(f"generation {generation} after {state.generation}")
    return Lifecycle(phase, generation)


def event_of(plan: Plan, rank: LogicalRank | None) -> Event:
    """Returns what a plan means for a process that has settled.

    Args:
        plan: of the process's generation.
        rank: the logical rank that it occupies; None for a spare.
    """
    if plan.verdict is Verdict.ABORT:
        return Event.FLUSHES if plan.is_flush else Event.GIVES_UP
    if plan.verdict is Verdict.ROLLBACK:
        return Event.LOADS
    if plan.verdict in {Verdict.RESUME, Verdict.COPIED}:
        return Event.STANDS
    if rank is not None and rank.pp in plan.start_of:
        return Event.REPLAYS
    return Event.SERVES
