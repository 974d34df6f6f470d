# SPDX-License-Identifier: Apache-2.0
"""Scenarios: everything that decides how a simulated world runs, drawn from one seed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from enum import Enum
from typing import Any

from megatron_moevement.policy.copies.retention import max_log_steps, max_replayed_steps
from megatron_moevement.policy.copies.slot_ring import ring_capacity
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.lost_states import LostStates
from megatron_moevement.testing.world.conditions import (
    UNCHANGING,
    Conditions,
    draw_all,
    draw_routing,
)
from megatron_moevement.testing.world.faults import Fault, FaultKind


class Links(Enum):
    """How well the copies of slots travel."""

    DEFAULT = "default"
    LOSSY = "lossy"
    SLOW = "slow"


@dataclasses.dataclass(frozen=True)
class Change:
    """Another W that is wanted, as `--moevement-schedule-changes` has it.

    Attributes:
        step: that must be committed first.
        window: the W.
    """

    step: int
    window: int


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One world.

    Attributes:
        seed: of all that is random while the world runs.
        layout: sizes of the job.
        ends: whether the embedding is tied.
        window: W.
        replicas: r.
        spares: idle processes at the start.
        processes_per_domain: processes on one node.
        micro_batches: per step and data-parallel rank.
        experts_per_rank: routed experts per layer on each rank.
        steps: the job is done after so many.
        lag: steps of acknowledgement lag that rings are sized for.
        links: how copies travel.
        durable_every: steps between durable checkpoints; 0 for none but the initial state.
        shared_memory: whether a store outlives its process.
        relaunches: how often the job is launched again after it ended unfinished.
        overflows: steps whose gradients overflow, in the dense and in the expert optimizer.
        faults: what goes wrong.
        lost_states: whether a lost state may be copied from a replica.
        loads: whether each launch loads what the job has saved; a restart in place always does.
        permuted: whether a launch puts ranks on other machines than the one before.
        one_machine: whether all processes share a machine, whatever they may be lost with.
        layouts: whether ranks place some slots that they fetch as those of a replica.
        changes: of W that are wanted in the course of the job.
        conditions: that the job goes by where it chooses its schedules.
    """

    seed: int
    layout: Layout
    ends: Ends = Ends.INDEPENDENT
    window: int = 2
    replicas: int = 1
    spares: int = 1
    processes_per_domain: int = 1
    micro_batches: int = 1
    experts_per_rank: int = 1
    steps: int = 12
    lag: int = 1
    links: Links = Links.DEFAULT
    durable_every: int = 0
    shared_memory: bool = False
    relaunches: int = 1
    overflows: tuple[tuple[int, bool, bool], ...] = ()
    faults: tuple[Fault, ...] = ()
    lost_states: LostStates = LostStates.REPLAYED
    loads: bool = True
    permuted: bool = False
    one_machine: bool = False
    layouts: bool = False
    changes: tuple[Change, ...] = ()
    conditions: Conditions = UNCHANGING

    @property
    def _windows(self) -> list[int]:
        changes = (change.window for change in self.changes)
        return [self.window, *changes, *(self.conditions.limits or ())]

    @property
    def min_window(self) -> int:
        """The smallest W: its slots are the largest."""
        return min(self._windows)

    @property
    def max_window(self) -> int:
        """The largest W: rings, logs and ledger are made for it, once."""
        return max(self._windows)

    @property
    def ring_capacity(self) -> int:
        """How many slots a rank's ring has."""
        return ring_capacity(self.max_window, self.lag)

    @property
    def log_capacity(self) -> int:
        """How many steps a rank's upstream log has room for."""
        return max_log_steps(self.max_window, self.lag + 1)

    @property
    def ledger_capacity(self) -> int:
        """How many entries of the ledger a process keeps."""
        return max_replayed_steps(self.max_window, self.lag) + 2

    @property
    def summary(self) -> str:
        """The sizes of the job, in one line."""
        layout = self.layout
        chunks = f", {layout.chunks} chunks" if layout.chunks > 1 else ""
        return (
            f"PP{layout.pp} x DP{layout.dp} x EP{layout.ep}{chunks}, {self.spares} spares, "
            f"W={self.window}, r={self.replicas}, {self.links.value} links"
        )

    def to_document(self) -> dict[str, Any]:
        """Returns the scenario as a JSON object that `of_document` reads."""
        text = json.dumps(dataclasses.asdict(self), default=lambda one: one.value)
        return dict(json.loads(text))

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Scenario:
        """Returns the scenario that `to_document` wrote."""
        fields = dict(document)
        fields["layout"] = Layout(**document["layout"])
        fields["ends"] = Ends(document["ends"])
        fields["links"] = Links(document["links"])
        fields["lost_states"] = LostStates(document.get("lost_states", "replayed"))
        fields["overflows"] = tuple(map(tuple, document["overflows"]))
        fields["changes"] = tuple(Change(**change) for change in document.get("changes", ()))
        if "conditions" in document:
            fields["conditions"] = Conditions.of_document(document["conditions"])
        fields["faults"] = tuple(
            Fault(
                FaultKind(fault["kind"]),
                fault["tick"],
                fault["victim"],
                None if fault.get("place") is None else FaultPoint(fault["place"]),
            )
            for fault in document["faults"]
        )
        return cls(**fields)


_LAYOUTS = (
    Layout(pp=1, dp=2),
    Layout(pp=2, dp=1),
    Layout(pp=2, dp=2),
    Layout(pp=2, dp=3),
    Layout(pp=3, dp=1),
    Layout(pp=3, dp=2),
    Layout(pp=3, ep=2),
    Layout(pp=4, dp=1),
    Layout(pp=4, dp=2),
    Layout(pp=5, dp=1),
    Layout(pp=5, dp=1),
    Layout(pp=6, dp=1),
    Layout(pp=6, dp=1),
    Layout(pp=2, dp=1, chunks=2),
    Layout(pp=3, dp=1, chunks=2),
    Layout(pp=4, dp=1, chunks=2),
)
_FAULTS = (
    *(FaultKind.CRASH,) * 10,
    *(FaultKind.NODE,) * 2,
    *(FaultKind.TORN,) * 2,
    FaultKind.HANG,
    FaultKind.EXCEPTION,
    FaultKind.HICCUP,
    FaultKind.FALSE_ALARM,
    FaultKind.CORRUPT_SLOT,
    *(FaultKind.CORRUPT_LOG,) * 2,
    FaultKind.CONTROL_STORE,
)
_FAULTS_AT_PLACES = (
    *(FaultKind.CRASH,) * 6,
    *(FaultKind.EXCEPTION,) * 5,
    FaultKind.NODE,
    FaultKind.HANG,
    FaultKind.HICCUP,
    FaultKind.CORRUPT_SLOT,
)
_SHARE_WITH_PLACES = 0.5
_SHARE_WITH_LAUNCH = 0.1
_SHARE_WITH_DAMAGE = 0.1
_SHARE_WITH_CHANGES = 0.4
_SHARE_WITH_CHOICE = 0.6
_ROUND_A_COMMIT = (
    FaultPoint.AFTER_BARRIER,
    FaultPoint.LEDGER,
    FaultPoint.COMMITTED,
    FaultPoint.GATHER,
)
_IN_A_STEP = tuple(place for place in FaultPoint if place.is_of_step)
_IN_A_RECOVERY = (
    *(place for place in FaultPoint if not place.is_of_step),
    FaultPoint.FETCH,
    FaultPoint.REPLAY,
    FaultPoint.DENSE,
    FaultPoint.COMMITTED,
)


def ticks_per_step(scenario: Scenario) -> int:
    """Returns about how many commands the world executes in one step without faults."""
    per_rank = 23 + 12 * scenario.micro_batches * scenario.layout.chunks + 2 * scenario.replicas
    return scenario.layout.num_ranks * per_rank


def scenario_of(seed: int) -> Scenario:
    """Draws a world from a seed; most faults come with the one before, or soon after it."""
    draw = random.Random(f"scenario {seed}")  # noqa: S311  (reproducible, not secret)
    layout = draw.choice(_LAYOUTS)
    window = draw.choice((1, 2, 2, 3, 3, 4, 5))
    scenario = Scenario(
        seed=seed,
        layout=layout,
        ends=draw.choice((Ends.TIED, Ends.INDEPENDENT, Ends.INDEPENDENT)),
        window=window,
        replicas=draw.choice((0, 1, 1, 2, 2)),
        spares=draw.choice((0, 1, 2, 3, 3, 4, 4, 4)),
        processes_per_domain=draw.choice((1, 1, 2)),
        micro_batches=draw.choice((1, 2)),
        steps=3 * window + draw.randrange(2, 6),
        links=draw.choice((Links.DEFAULT, Links.DEFAULT, Links.LOSSY, Links.SLOW)),
        durable_every=draw.choice((0, 3, 5)),
        shared_memory=draw.random() < 0.3,
        overflows=_draw_overflows(draw),
    )
    # Drawn apart: which worlds there are does not depend on it.
    lost = random.Random(f"lost states {seed}").choice(list(LostStates))  # noqa: S311
    one_machine = random.Random(f"machines {seed}").random() < 0.4  # noqa: S311
    again = random.Random(f"launched again {seed}")  # noqa: S311
    scenario = dataclasses.replace(
        scenario,
        one_machine=one_machine,
        layouts=random.Random(f"layouts {seed}").random() < 0.4,  # noqa: S311
        loads=again.random() < 0.6,
        permuted=again.random() < 0.4,
    )
    changed = random.Random(f"schedules {seed}")  # noqa: S311
    if changed.random() < _SHARE_WITH_CHANGES:
        scenario = _with_schedules(scenario, changed)
    faults = _draw_faults(scenario, draw)
    apart = random.Random(f"places {seed}")  # noqa: S311
    if apart.random() < _SHARE_WITH_PLACES:
        faults = _draw_faults_at_places(scenario, apart)
    scenario = dataclasses.replace(scenario, faults=faults, lost_states=lost)
    launches = random.Random(f"launches {seed}")  # noqa: S311
    if launches.random() < _SHARE_WITH_LAUNCH:
        return _with_launch(scenario, launches)
    if launches.random() < _SHARE_WITH_DAMAGE:
        faults = (*scenario.faults, *_draw_damage(scenario, launches))
        scenario = dataclasses.replace(scenario, faults=faults)
    return scenario


def _with_schedules(scenario: Scenario, draw: random.Random) -> Scenario:
    """Returns a job whose schedules change: its W is chosen, or changed at steps that are given.

    The latter changes W at once and again, as a choice that waits for its measurements does not.
    """
    scenario = dataclasses.replace(scenario, experts_per_rank=draw.choice((1, 2, 4)))
    if draw.random() < _SHARE_WITH_CHOICE:
        steps = draw.randrange(20, 44)
        return dataclasses.replace(
            scenario,
            steps=steps,
            micro_batches=1,
            links=draw.choice((Links.DEFAULT, Links.DEFAULT, Links.LOSSY)),
            conditions=draw_all(draw, steps, scenario.window),
        )
    changed = sorted(draw.sample(range(scenario.steps - 1), draw.choice((1, 1, 2, 3))))
    windows = (scenario.window, 1, 2, 3, 4, 5)
    return dataclasses.replace(
        scenario,
        changes=tuple(Change(step, draw.choice(windows)) for step in changed),
        conditions=draw_routing(draw, scenario.steps),
    )


def _draw_overflows(draw: random.Random) -> tuple[tuple[int, bool, bool], ...]:
    draw.random()  # nothing hangs on it any more; seeds keep their worlds
    return tuple(
        (step, draw.random() < 0.6, draw.random() < 0.6)
        for step in draw.sample(range(1, 10), draw.randrange(3))
    )


def _draw_faults(scenario: Scenario, draw: random.Random) -> tuple[Fault, ...]:
    per_step = ticks_per_step(scenario)
    last = per_step * (scenario.steps + 1)
    earliest = 0 if draw.random() < 0.2 else 2 * scenario.window * per_step
    tick = draw.randrange(earliest, last)
    faults = []
    more = draw.choice((1, 1, 2, 2, 2, 3, 4))
    if scenario.layout.pp > 3 and draw.random() < 0.5:
        ranks = draw.sample(range(scenario.layout.num_ranks), 2)
        faults = [Fault(FaultKind.CRASH, tick, rank) for rank in ranks]
        more = draw.choice((0, 0, 1))
    for _ in range(more):
        victim = draw.choice((-1, draw.randrange(64), draw.randrange(64)))
        faults.append(Fault(draw.choice(_FAULTS), tick, victim))
        nearness = draw.random()
        if nearness < 0.4:
            tick += draw.randrange(3)
        elif nearness < 0.75:
            tick += draw.randrange(per_step)
        else:
            tick = draw.randrange(earliest, last)
    return tuple(sorted(faults, key=lambda fault: fault.tick))


def _draw_faults_at_places(scenario: Scenario, draw: random.Random) -> tuple[Fault, ...]:
    """Draws faults where production has a place for them: in a step, then in the recovery of it."""
    per_step = ticks_per_step(scenario)
    early = draw.random() < 0.15
    tick = draw.randrange(0 if early else per_step, per_step * (scenario.steps + 1))
    places = draw.choice((_IN_A_STEP, _IN_A_STEP, _ROUND_A_COMMIT, (None,)))
    faults = []
    for _ in range(draw.choice((1, 2, 2, 3))):
        place = draw.choice(places)
        victim = draw.choice((-1, -1, draw.randrange(64)))
        faults.append(Fault(draw.choice(_FAULTS_AT_PLACES), tick, victim, place))
        while draw.random() < 0.4:
            also = draw.choice((FaultKind.CRASH, FaultKind.CRASH, FaultKind.EXCEPTION))
            faults.append(Fault(also, tick, draw.randrange(64), place))
        places = _IN_A_RECOVERY
    return tuple(faults)


def _draw_damage(scenario: Scenario, draw: random.Random) -> tuple[Fault, ...]:
    """Draws a slot that is damaged before it is sent, or logs right before they are needed."""
    per_step = ticks_per_step(scenario)
    tick = draw.randrange(per_step, per_step * scenario.steps)
    if draw.random() < 0.5:
        return (Fault(FaultKind.CORRUPT_SLOT, tick, -1, FaultPoint.AFTER_PUBLISH),)
    victims = [draw.randrange(64) for _ in range(3)]
    logs = [Fault(FaultKind.CORRUPT_LOG, tick + place, each) for place, each in enumerate(victims)]
    return (*logs, Fault(FaultKind.CRASH, tick + len(logs), draw.randrange(64)))


def _with_launch(scenario: Scenario, draw: random.Random) -> Scenario:
    """Draws a job that new processes go on with: in place of all that died, or launched again.

    All its memory is there, but for what a fault in the start-up of the new processes takes.
    """
    ranks, per_step = scenario.layout.num_ranks, ticks_per_step(scenario)
    tick = draw.randrange(2 * scenario.window * per_step, per_step * (scenario.steps + 1))
    in_place = draw.random() < 0.5
    lost = ranks if in_place else 2
    places = (
        FaultPoint.CONNECT,
        FaultPoint.START,
        FaultPoint.START,
        FaultPoint.FACTS,
        FaultPoint.PLAN,
        FaultPoint.OPEN,
    )
    kinds = (FaultKind.CRASH, FaultKind.CRASH, FaultKind.EXCEPTION)
    later = tick + (0 if in_place else draw.randrange(4, 30) * ranks)
    again = [Fault(draw.choice(kinds), later, -1, draw.choice(places))]
    return dataclasses.replace(
        scenario,
        spares=ranks + 1 if in_place else 1,
        replicas=draw.choice((0, scenario.replicas)),
        one_machine=True,
        shared_memory=True,
        faults=(*[Fault(FaultKind.CRASH, tick, 0)] * lost, *again * draw.randrange(2)),
    )
