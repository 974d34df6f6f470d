# SPDX-License-Identifier: Apache-2.0
"""The drawing of histories: one to four strikes, in one launch or in several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from random import Random

from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.settings.faults import Fault, FaultPoint
from tests.harness.explorer.drawn_job import weighted
from tests.harness.explorer.history import History, Kill, Launch
from tests.harness.explorer.job import DrawnJob

MOST_PROCESSES = 8
"""Of a launch, spares counted: two cores have to run them."""
_MOST_STRIKES = 4
IN_REPLAYS = (FaultPoint.FETCH, FaultPoint.REPLAY, FaultPoint.DENSE)
"""Places that a process comes to in a recovery alone, in a step of the window or a replayed one."""
IN_RECOVERIES = tuple(place for place in FaultPoint if not place.is_of_step)
"""Places of starts and recoveries, and of those that serve, whatever the step is."""
IN_STARTS = (FaultPoint.CONNECT, FaultPoint.START, FaultPoint.FACTS, FaultPoint.OPEN)
"""Those of them that the start of a launch comes to."""
_LONGEST_WAIT_S = 0.6
"""After a step was reported: some small steps."""
_LONGEST_END_S = 1.2
"""After the last step was reported: until all processes of a small job have ended."""
_AT_THE_END = 0.1
"""Of the histories, those whose last launch loses processes while it ends."""
_WITHOUT_MEMORY = 0.7
"""Of the deaths of all processes of a job with tiers, those after which no memory is left."""
_LONGEST_START_S = 6.0
"""From the start of a launch: until a small job trains."""


class Way(Enum):
    """How a strike comes."""

    PLACE = "place"
    """At a place of a step."""
    OUTSIDE = "outside"
    """By SIGKILL at a random time."""
    RECOVERY = "recovery"
    """At a place of the recovery from the strike before it."""
    START = "start"
    """While a launch starts: at a place of it, or by SIGKILL."""
    HICCUP = "hiccup"
    """By an exception in a thread that sends copies, or that makes them, and then a loss."""
    BEHIND = "behind"
    """By an exception around a commit, so that some are a step behind; others are lost then, or
    once those that are behind were cut again while they caught up."""
    WHOLE = "whole"
    """By SIGKILL to every process; the job is launched again."""


_WAYS = (
    (8, Way.PLACE),
    (4, Way.OUTSIDE),
    (4, Way.RECOVERY),
    (2, Way.START),
    (3, Way.WHOLE),
    (3, Way.HICCUP),
    (3, Way.BEHIND),
)
_KINDS = (
    (6, FaultKind.KILL),
    (1, FaultKind.STOP),
    (2, FaultKind.EXCEPTION),
    (1, FaultKind.EXIT),
    (1, FaultKind.SEGFAULT),
)


@dataclasses.dataclass
class _Draft:
    """A launch while it is drawn."""

    faults: list[Fault] = dataclasses.field(default_factory=list)
    kills: list[Kill] = dataclasses.field(default_factory=list)
    lost: int = 0
    restarts: int = 0
    step: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.faults and not self.kills


def draw_history(random: Random, job: DrawnJob) -> History:
    """Draws what happens to a job."""
    count = random.choices(range(1, _MOST_STRIKES + 1), [4, 4, 2, 1])[0]
    steps = sorted(_draw_step(random, job) for _ in range(count))
    launches: list[Launch] = []
    draft = _Draft()
    for step in steps:
        way = weighted(random, _WAYS)
        if way is Way.RECOVERY and not draft.restarts and not launches:
            way = Way.PLACE
        if way is Way.START and not draft.is_empty:
            launches.append(_finish(random, job, _whole(random, draft, step)))
            draft = _Draft(step=step)
        _strike(random, job, draft, step, way)
        if way is Way.WHOLE:
            launches.append(_finish(random, job, draft))
            draft = _Draft(step=step)
    if not draft.is_empty:
        launches.append(_finish(random, job, draft))
    # What is drawn after it stays the same.
    ends = Random(f"end {job} {launches}")  # noqa: S311
    if ends.random() < _AT_THE_END:
        launches[-1] = _struck_at_its_end(ends, job, launches[-1])
    return History(tuple(_without_memory(job, launches)))


def _without_memory(job: DrawnJob, launches: list[Launch]) -> Iterator[Launch]:
    """Yields launches whose end mostly takes all memory with it, where there are tiers."""
    if not job.protection.tier_interval:
        yield from launches
        return
    random = Random(f"memory {job} {launches}")  # noqa: S311  (as above)
    strikes = sum(len(launch.faults) + len(launch.kills) for launch in launches)
    for launch in launches:
        kills = launch.kills
        if launch is launches[-1] and strikes < _MOST_STRIKES and not launch.ends_whole:
            kills = (*kills, Kill(_draw_step(random, job), None, _draw_wait(random)))
        forgets = random.random() < _WITHOUT_MEMORY
        kills = tuple(
            dataclasses.replace(kill, forgets=True) if forgets and kill.is_whole else kill
            for kill in kills
        )
        yield dataclasses.replace(launch, kills=kills)


def _struck_at_its_end(random: Random, job: DrawnJob, launch: Launch) -> Launch:
    """Returns a launch that loses some ranks after its last step, with a spare more."""
    after_s = round(random.uniform(0, _LONGEST_END_S), 2)
    ranks = _draw_ranks(random, job)
    kill = Kill(job.training.steps, ranks, after_s, forgets=random.random() < 0.5)
    spares = min(launch.spares + 1, MOST_PROCESSES - job.layout.ranks)
    return dataclasses.replace(launch, spares=spares, kills=(*launch.kills, kill))


def _draw_step(random: Random, job: DrawnJob) -> int:
    """Draws a step to strike in: one in five lies before a window can be persisted."""
    first = 1 if random.random() < 0.2 else min(job.protected_from + 1, job.training.steps - 2)
    return random.randint(first, job.training.steps - 2)


def _strike(random: Random, job: DrawnJob, draft: _Draft, step: int, way: Way) -> None:
    match way:
        case Way.WHOLE:
            _whole(random, draft, step)
        case Way.START if random.random() < 0.5:
            place = random.choice(IN_STARTS)
            _add_fault(random, job, draft, place, step)
        case Way.START:
            after_s = round(random.uniform(0, _LONGEST_START_S), 2)
            one = random.randrange(job.layout.ranks)
            draft.kills.append(Kill(0, (one,), after_s, forgets=random.random() < 0.3))
            draft.lost += 1
            draft.restarts += 1
        case Way.OUTSIDE:
            ranks = _draw_ranks(random, job)
            after_s = _draw_wait(random)
            draft.kills.append(Kill(step, ranks, after_s, forgets=random.random() < 0.5))
            draft.lost += len(ranks)
            draft.restarts += 1
        case Way.PLACE:
            _add_fault(random, job, draft, *_draw_place(random, job, step))
        case Way.HICCUP:
            _hiccup(random, job, draft, step)
        case Way.BEHIND:
            _leave_behind(random, job, draft, step)
        case Way.RECOVERY:
            _add_fault(random, job, draft, *_draw_place_of_recovery(random, job, draft.step, step))
    draft.step = step


def _whole(random: Random, draft: _Draft, step: int) -> _Draft:
    draft.kills.append(Kill(step, None, _draw_wait(random)))
    return draft


def _hiccup(random: Random, job: DrawnJob, draft: _Draft, step: int) -> None:
    """Adds exceptions of a rank's threads, and the loss of that rank some steps later.

    Its memory is lost with it now and then: then copies are all that is left of its slots.
    """
    rank = (random.randrange(job.layout.ranks),)
    place = random.choice(
        [FaultPoint.SEND, FaultPoint.SEND, FaultPoint.COPY, FaultPoint.AFTER_PUBLISH]
    )
    first = max(1, random.randint(step // 2, step - 1))
    _add_fault(random, job, draft, place, first, ranks=rank, kind=FaultKind.EXCEPTION)
    last = min(step + random.randint(0, 4), job.training.steps - 1)
    if random.random() < 0.5:
        draft.kills.append(Kill(last, rank, _draw_wait(random), forgets=True))
        draft.lost += 1
        draft.restarts += 1
        return
    _add_fault(random, job, draft, FaultPoint.BACKWARD, last, ranks=rank, kind=FaultKind.KILL)


def _leave_behind(random: Random, job: DrawnJob, draft: _Draft, step: int) -> None:
    """Adds an exception of some ranks behind the barrier of a step, and the loss of the others.

    Those that are behind may be cut once more, in their roll-forward, and the others lost then.
    """
    everybody = range(job.layout.ranks)
    behind = tuple(sorted(random.sample(everybody, random.randint(1, len(everybody) - 1))))
    ahead = tuple(rank for rank in everybody if rank not in behind)
    place = FaultPoint.AFTER_BARRIER
    _add_fault(random, job, draft, place, step, ranks=behind, kind=FaultKind.EXCEPTION)
    place = random.choice(IN_RECOVERIES)
    if random.random() < 0.6:
        cut = random.choice(
            [FaultPoint.LEDGER, FaultPoint.LEDGER, FaultPoint.COMMITTED, FaultPoint.ROLL_FORWARD]
        )
        _add_fault(random, job, draft, cut, step, ranks=behind, kind=FaultKind.EXCEPTION)
        place = random.choice([FaultPoint.CONNECT, FaultPoint.START, FaultPoint.FACTS])
    _add_fault(random, job, draft, place, step, ranks=ahead, kind=FaultKind.KILL)


def _draw_wait(random: Random) -> float:
    return round(random.uniform(0, _LONGEST_WAIT_S), 2)


def _add_fault(
    random: Random,
    job: DrawnJob,
    draft: _Draft,
    place: FaultPoint,
    step: int,
    *,
    ranks: tuple[int, ...] | None = None,
    kind: FaultKind | None = None,
) -> None:
    """Adds a fault of the generation that the strikes before it lead to."""
    kind = kind or weighted(random, _KINDS)
    ranks = ranks or _draw_ranks(random, job)
    where = {(one.step, one.place, one.generation) for one in draft.faults}
    if (step, place, draft.restarts) in where:
        return
    draft.faults.append(Fault(step, place, frozenset(ranks), draft.restarts, kind))
    if kind is not FaultKind.EXCEPTION:
        draft.lost += len(ranks)
    if place is not FaultPoint.SEND or kind is not FaultKind.EXCEPTION:
        draft.restarts += 1


def _draw_place(random: Random, job: DrawnJob, step: int) -> tuple[FaultPoint, int]:
    """Draws a place of a step, and moves the step to where a process comes to it."""
    places = [place for place in FaultPoint if place.is_of_step and place not in IN_REPLAYS]
    window, every = job.protection.window, job.training.save_every
    if not every:
        places.remove(FaultPoint.SAVE)
    place = random.choice(places)
    if place is FaultPoint.SAVE:
        return place, max(every, step // every * every)
    if place is FaultPoint.WINDOW_EDGE:
        return place, max(window, step // window * window)
    return place, step


def _draw_place_of_recovery(
    random: Random, job: DrawnJob, struck: int, step: int
) -> tuple[FaultPoint, int]:
    """Draws a place of a recovery from a strike, and the step that a process comes to it in.

    Args:
        random: draws.
        job: that is struck.
        struck: the step of the strike.
        step: that the next strike would come in, were it in no recovery.
    """
    window = job.protection.window
    place = random.choice([*IN_REPLAYS, *IN_RECOVERIES, FaultPoint.BACKWARD, FaultPoint.COMMIT])
    if place in IN_RECOVERIES:
        return place, step
    # The newest window that can have been persisted.
    target = max(struck - 1, 1)
    start = max((target - window) // window * window, 0)
    if place is FaultPoint.DENSE:
        return place, start + window - 1
    if place is FaultPoint.FETCH:
        return place, random.randint(start, start + window - 1)
    return place, random.randint(min(start + 1, target), target)


def _draw_ranks(random: Random, job: DrawnJob) -> tuple[int, ...]:
    """Draws who is struck: mostly one rank, or a failure domain, sometimes several, seldom all."""
    ranks, domain = job.layout.ranks, job.protection.domain
    if domain > 1 and random.random() < 0.5:
        one = random.randrange(ranks) // domain * domain
        return tuple(range(one, min(one + domain, ranks)))
    most = random.choices([1, 2, 3, ranks], [16, 3, 1, 1])[0]
    count = min(most, ranks)
    return tuple(sorted(random.sample(range(ranks), count)))


def _finish(random: Random, job: DrawnJob, draft: _Draft) -> Launch:
    """Gives a launch its spares: mostly enough of them, now and then too few."""
    more = random.choices([0, 1, -1, -2], [12, 3, 3, 1])[0]
    room = MOST_PROCESSES - job.layout.ranks
    spares = max(0, min(draft.lost + more, room))
    return Launch(spares, tuple(draft.faults), tuple(draft.kills))
