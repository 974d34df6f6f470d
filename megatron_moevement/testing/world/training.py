# SPDX-License-Identifier: Apache-2.0
"""Training: how a simulated rank executes the commands of a step, live or as a replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.recovery.lifecycle import Event
from megatron_moevement.policy.watching.measurements import NOT_MEASURED, Reduced, are_due
from megatron_moevement.policy.window.timetable import Proposal, announced_version
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world import arithmetic
from megatron_moevement.testing.world.arithmetic import Entry, Local
from megatron_moevement.testing.world.conditions import Cores
from megatron_moevement.testing.world.counting import reduce_counts
from megatron_moevement.testing.world.process import (
    At,
    Commands,
    Join,
    Pass,
    Process,
    Receive,
    Run,
    Sleep,
    Until,
    Wait,
)
from megatron_moevement.testing.world.simulated_store import LoggedTensor
from megatron_moevement.testing.world.step_model import Command, Section

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

COMPUTE_TIME = 1.0
LOG_COPY_TIME = 0.3
LOG_FETCH_TIME = 0.4


def train(world: World, process: Process) -> Commands:
    """Trains until the job is done."""
    shape = world.shape
    while process.state.step < world.scenario.steps:
        yield from run_step(world, process, Run(process.state.step + 1))
        world.proposals.after_step(process)
    name = ("finish", process.state.step)
    yield Join(name, shape.layout.ranks, process.rank, None, len)
    process.advance(Event.ENDS)
    world.finished = True


def run_step(world: World, process: Process, run: Run) -> Commands:
    """Executes one step up to its commit; everything before the commit may be interrupted."""
    process.run = run
    world.invariants.logs.begins(process, run.step)
    process.store.logs[run.step] = {}
    if run.plan is not None:
        run.entry = process.store.ledger[run.step]
    if world.scenario.conditions.counts_tokens:
        run.counts = world.tokens.counts(process.place, run.step)
    for command in world.policies.training_step:
        if command in _PLACES:
            yield At(_PLACES[command])
        if command is Command.BARRIER:
            run.finished = True
        if command in _HANDLERS:
            yield from _HANDLERS[command](world, process, run)
        yield Pass()


def _commit(world: World, process: Process, run: Run) -> Commands:
    yield from world.commits.execute(process, run, Section)
    yield Pass()


def _forward_backward(world: World, process: Process, run: Run) -> Commands:
    shape, history, live, rank = world.shape, world.history, process.state, process.place
    parts = shape.parts[rank]
    weights = [arithmetic.weights_of(history, live, part) for part in parts]
    inputs: list[list[int]] = [[] for _ in parts]
    upstream: list[list[int]] = [[] for _ in parts]
    losses: list[int] = []
    forward = functools.partial(BoundaryTag, run.step, Direction.FORWARD)
    backward = functools.partial(BoundaryTag, run.step, Direction.BACKWARD)
    for chunk, part in enumerate(parts):
        for micro_batch in range(shape.micro_batches):
            if part.number == 0:
                x = arithmetic.batch(history, rank, live.cursor, micro_batch)
            else:
                tag = forward(part.number - 1, part.number, micro_batch)
                x = yield from _receive(world, process, run, tag)
            yield At(FaultPoint.FORWARD)
            yield Sleep(COMPUTE_TIME)
            inputs[chunk].append(x)
            y = history.of("forward", x, weights[chunk])
            if part.number < shape.last_part:
                tag = forward(part.number, part.number + 1, micro_batch)
                yield from _send(world, process, run, tag, y)
            else:
                losses.append(y)
    yield At(FaultPoint.FORWARD_BACKWARD)
    if captured := process.scheduling.meter.captured:
        burden = world.link_times.burden(captured[-1])
        process.scheduling.meter.burden += burden
        yield Sleep(0.0 if world.scenario.conditions.cores is Cores.YIELDED else burden)
    for chunk, part in reversed(list(enumerate(parts))):
        for micro_batch in range(shape.micro_batches):
            if part.number == shape.last_part:
                gradient = history.of("scaled", losses[micro_batch], live.scalers[0])
            else:
                tag = backward(part.number + 1, part.number, micro_batch)
                gradient = yield from _receive(world, process, run, tag)
            yield At(FaultPoint.BACKWARD)
            yield Sleep(COMPUTE_TIME)
            upstream[chunk].append(gradient)
            if part.number > 0:
                x = inputs[chunk][micro_batch]
                sent = history.of("backward", gradient, x, weights[chunk])
                tag = backward(part.number, part.number - 1, micro_batch)
                yield from _send(world, process, run, tag, sent)
    chunks = tuple(
        history.of("chunk", weights[chunk], *inputs[chunk], *upstream[chunk])
        for chunk in range(len(parts))
    )
    run.local = Local(chunks, frozenset(live.frozen), tuple(losses))


def _send(world: World, process: Process, run: Run, tag: BoundaryTag, value: int) -> Commands:
    """Sends a boundary tensor and logs it; a replay sends only to neighbours that replay too."""
    yield At(FaultPoint.BOUNDARY_SEND)
    landed_at = world.clock.now + LOG_COPY_TIME * (1 + 9 * world.random.random() ** 2)
    run.logged_at = max(run.logged_at, landed_at)
    logged = LoggedTensor(value, landed_at)
    process.store.logs.setdefault(tag.step, {})[tag] = logged
    receiver = world.shape.part_stage(tag.receiver)
    if run.plan is None or run.plan.start(receiver) < run.step:
        world.network.send_boundary(process, receiver, tag, value)
    yield Pass()


def _receive(
    world: World, process: Process, run: Run, tag: BoundaryTag
) -> Generator[Wait, Any, int]:
    """Takes a boundary tensor from a live neighbour, or from its log when it is ahead."""
    sender = world.shape.part_stage(tag.sender)
    if run.plan is None or run.plan.start(sender) < run.step:
        value: int = yield Receive(tag)
        return value
    yield Sleep(LOG_FETCH_TIME)
    neighbour = world.neighbour(process, sender)
    if neighbour is None:
        yield Until(lambda: False, "the restart")
    assert neighbour is not None
    yield At(FaultPoint.SERVE_LOG, neighbour.number)
    logged = neighbour.store.logs.get(tag.step, {}).get(tag)
    if logged is None or not logged.intact:
        world.report(f"{process} finds no intact {tag} in the log of {neighbour}")
        yield world.restarts.awaited()
    assert logged is not None
    return logged.value


def _reduce_gradients(world: World, process: Process, run: Run) -> Commands:
    rank = process.place
    group = world.shape.groups[rank.pp]
    name = ("reduce", run.step, group[0].pp)

    combine = functools.partial(arithmetic.reduce, world.history, world.shape)
    run.reduced = yield Join(name, group, rank, run.local, combine)


def _gradient_norm(world: World, process: Process, run: Run) -> Commands:
    if run.plan is not None:
        return
    rank = process.place
    pipeline = world.shape.pipelines[rank]

    def combine(values: dict[Any, Any]) -> Entry:
        by_stage = [values[member] for member in pipeline]
        norm = world.history.of("norm", *(result.stands_for for result in by_stage))
        return Entry(by_stage[-1].loss, norm, world.reference.found_inf(run.step))

    run.entry = yield Join(("norm", run.step, pipeline[0]), pipeline, rank, run.reduced, combine)


def _await_capture(world: World, process: Process, run: Run) -> Commands:
    run.waits_since = world.clock.now
    if process.capturing is not None:
        yield Until(lambda: process.capturing is None, "the capture")


def _await_log(world: World, process: Process, run: Run) -> Commands:
    missing = run.logged_at - world.clock.now
    if missing > 0:
        yield Sleep(missing)


def _await_room(world: World, process: Process, run: Run) -> Commands:
    def has_room() -> bool:
        return world.policies.may_vote(process.ring, process.timetable, process.acknowledgements)

    if not has_room():
        yield Until(has_room, "room for a slot")
    now, is_in_trouble = world.clock.now, bool(process.troubles)
    stall = now - (run.waits_since or now)
    process.scheduling.meter.step_ends(now, stall, is_in_trouble=is_in_trouble)
    acknowledgements = process.acknowledgements
    run.complete = acknowledgements.newest_complete()
    run.copies = acknowledgements.fewest_copies(process.store.persisted)


def _barrier(world: World, process: Process, run: Run) -> Commands:
    rank = process.place
    is_apart = run.plan is not None and run.plan.is_apart
    ranks = world.shape.groups[rank.pp] if is_apart else world.shape.layout.ranks
    world.invariants.work.votes(process)
    yield from reduce_counts(world, process, run)
    covered = (-1, 0) if run.complete is None else (run.complete.start, run.copies)
    vote = (
        *world.policies.coverage_vote(*covered),
        *world.policies.schedule_vote(process.timetable, _proposal(process, run)),
        *(measured := _measured(world, process, run)),
    )
    name = ("barrier", run.step, ranks[0].pp, len(ranks))

    def combine(votes: dict[Any, tuple[int, ...]]) -> list[int]:
        if run.plan is None:
            world.invariants.schedules.told(run.step, votes.values())
        return [max(column) for column in zip(*votes.values(), strict=True)]

    greatest = yield Join(name, ranks, rank, vote, combine, world.policies.votes_suffice)
    yield At(FaultPoint.AFTER_BARRIER)
    if not is_apart:
        start, run.agreed_copies = world.policies.agreed_coverage(greatest[:2])
        run.agreed_persisted = None if start < 0 else process.timetable.window_of(start)
    newest, least, *numbers = greatest[2:]
    run.measured = world.policies.heard(measured, Reduced(*numbers))
    known = (newest, least)
    own, version = process.scheduling, world.policies.agreed_version(known)
    own.announced = announced_version(known)
    if version is not None and version > process.timetable.newest.schedule_version:
        assert own.proposed is not None
        run.agreed_schedule = own.proposed


def _measured(world: World, process: Process, run: Run) -> Reduced:
    """Returns what a rank tells of its link, at the steps at which all do."""
    is_told = world.scenario.conditions.measures and run.plan is None
    if not is_told or not are_due(process.timetable, run.step):
        return NOT_MEASURED
    return process.scheduling.meter.measured(process.holders, world.scenario.conditions.cores)


def _proposal(process: Process, run: Run) -> Proposal | None:
    """Returns the schedule that a rank votes for; what was done before is not decided again."""
    proposed = process.scheduling.proposed
    return None if run.plan is not None or proposed is None else proposed.proposal


_PLACES = {
    Command.REDUCE_GRADIENTS: FaultPoint.FINALIZE,
    Command.FINALIZE: FaultPoint.AFTER_FINALIZE,
    Command.GRADIENT_NORM: FaultPoint.PREPARE,
    Command.BARRIER: FaultPoint.BARRIER,
}
"""Where production has a fault place in front of a command."""

_HANDLERS: dict[Command, Callable[[World, Process, Run], Commands]] = {
    Command.FORWARD_BACKWARD: _forward_backward,
    Command.REDUCE_GRADIENTS: _reduce_gradients,
    Command.GRADIENT_NORM: _gradient_norm,
    Command.AWAIT_CAPTURE: _await_capture,
    Command.AWAIT_LOG: _await_log,
    Command.AWAIT_ROOM: _await_room,
    Command.BARRIER: _barrier,
    Command.COMMIT: _commit,
}
