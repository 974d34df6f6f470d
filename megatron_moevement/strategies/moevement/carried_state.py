# SPDX-License-Identifier: Apache-2.0
"""Carried state: what a process takes over a restart besides model, store and ledger.

One object for the life of a process. The strategy of each generation fills it, and that of the next
one reads what its facts, its roll-forward and its logs need. Each field is published by one
assignment: an interrupt may come before any bytecode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_moevement.policy.facts.facts import Condition, Facts, LiveState
from megatron_moevement.policy.job.guarantee import Computations, Guarantee, Level
from megatron_moevement.policy.outcome.replay_doubt import Trusted
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.strategies.moevement.protection.resident_store import ResidentStore
from megatron_moevement.strategies.scalars import SlotScalars


@dataclasses.dataclass(frozen=True)
class SurvivingState:
    """What the live objects of a process are worth.

    Attributes:
        state: as its facts tell it.
        scalars: what belongs to that state besides tensors; None where the state is lost. In a
            partial state each operator counts its own steps, and the counter among them has no use.
        random_after: the random streams behind the passes of the step whose gradients are finished.
    """

    state: LiveState
    scalars: SlotScalars | None = None
    random_after: Mapping[str, Any] | None = None

    @classmethod
    def dense(cls, scalars: SlotScalars) -> SurvivingState:
        """Returns a state that is complete, between two steps or before the end of a barrier."""
        return cls(LiveState(Condition.DENSE, scalars.progress.committed), scalars)

    def without_finished(self) -> SurvivingState:
        """Returns the same state where gradients, if any were finished, are gone."""
        state = dataclasses.replace(self.state, finished=None)
        return dataclasses.replace(self, state=state, random_after=None)

    @property
    def own_scalars(self) -> SlotScalars:
        """What belongs to the state besides tensors; it is not lost."""
        assert self.scalars is not None
        return self.scalars

    def with_finished(self, step: int, random_after: Mapping[str, Any]) -> SurvivingState:
        """Returns the same state with the gradients of a step ready to be applied."""
        state = dataclasses.replace(self.state, finished=step)
        return dataclasses.replace(self, state=state, random_after=random_after)


TORN = SurvivingState(LiveState(Condition.TORN))
"""A commit is under way."""

GIVEN_UP = SurvivingState(LiveState(Condition.ABSENT))
"""A replay is to overwrite the state and has not loaded its window's first slot yet; or it has
differed from the first time."""

INITIAL = SurvivingState(LiveState(Condition.ABSENT))
"""A new process: it holds the weights that the seed gives."""


@dataclasses.dataclass(frozen=True)
class Promise:
    """What the job may rely on, as the newest generation agreed that this process was in.

    Attributes:
        origin: what the ranks of that generation compute with.
    """

    origin: Computations
    guarantee: Guarantee


NO_PROMISE = Promise(Computations(), Guarantee())
"""A process that was in no generation: it has nothing to compare with."""


@dataclasses.dataclass(frozen=True)
class Outage:
    """The parts of the present restart that lie before the strategy's.

    Attributes:
        durations_s: how long `detect`, `teardown` and `rendezvous` took.
        joined_s: when the restart had its groups, in seconds since the epoch; None without one.
    """

    durations_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    joined_s: float | None = None


NO_OUTAGE = Outage()
"""None lies between the present generation and what `recovered` reported last."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """How a generation starts, the same on all ranks.

    Attributes:
        facts: of all processes, of the newest history.
        plan: None where a launch finds nothing in memory that is newer than what it loads.
        eras: of the histories of all processes.
        is_continuing: whether the job has trained before, as far as its processes know.
    """

    facts: Facts
    plan: Plan | None
    eras: tuple[int, ...]
    is_continuing: bool


@dataclasses.dataclass
class CarriedState:
    """What a process keeps; made empty at its start.

    Attributes:
        store: its files; they belong to the process, whatever becomes of its live objects.
        log: what it sent over its stage's boundaries; None before the first plan of the job.
        outage: the present restart. Whoever restarts may fill it in; the event `recovered` has it.
        agreed: the newest plan; it holds in its generation, also where live objects are built anew
            in order to carry it out.
        trusted: the copies to begin with where a replay differed from the first time; plans pass
            over all others until a replay proves right.
    """

    store: ResidentStore = dataclasses.field(default_factory=ResidentStore)
    live: SurvivingState = INITIAL
    log: UpstreamLog | None = None
    outage: Outage = NO_OUTAGE
    promise: Promise = NO_PROMISE
    agreed: Agreed | None = None
    trusted: Trusted = dataclasses.field(default_factory=dict)

    @classmethod
    def anew(cls, former: CarriedState) -> CarriedState:
        """Returns what a process goes on with whose live objects are given up."""
        return cls(
            former.store,
            outage=former.outage,  # which is not over
            promise=former.promise,
            agreed=former.agreed,
            trusted=former.trusted,
        )

    @property
    def level(self) -> Level:
        """What the job promises."""
        return self.promise.guarantee.level

    @property
    def scalars(self) -> SlotScalars:
        """What belongs to the live state besides tensors; there is one."""
        return self.live.own_scalars

    @property
    def is_new(self) -> bool:
        """Whether this process has never held a state: all that it has was left by others."""
        return self.live is INITIAL

    @property
    def is_pristine(self) -> bool:
        """Whether the weights are still those that the seed gives."""
        state = self.live.state
        return self.live is INITIAL or (state.condition is Condition.DENSE and state.step == 0)
