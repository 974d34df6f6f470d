# SPDX-License-Identifier: Apache-2.0
"""What facts say, read in the plainest way: for tests, which must not ask the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.recovery.plan import Origin, Plan
from megatron_moevement.policy.window.schedule import Window


def holders(facts: Facts, owner: LogicalRank, window: Window, slot: int) -> set[int]:
    """Returns the processes that have a slot."""
    return {
        each.process
        for each in facts.processes
        for held in each.holdings
        if (held.owner, held.window) == (owner, window) and held.slots >> slot & 1
    }


def has_all(facts: Facts, window: Window, needed: Mapping[LogicalRank, int]) -> bool:
    """Returns whether somebody has every slot that ranks need, from their first one on."""
    return all(
        holders(facts, rank, window, slot)
        for rank, first in needed.items()
        for slot in range(first, window.size)
    )


def loads_of(plan: Plan, facts: Facts) -> dict[LogicalRank, int]:
    """Returns for each rank that converts a plan's window the slot that it loads first.

    Raises:
        AssertionError: a slot after it is missing, or comes from elsewhere than it should.
    """
    assert plan.window is not None
    found: dict[LogicalRank, list[int]] = {}
    for fetch in plan.slot_fetches():
        key, process = fetch.slot, facts.by_rank.get(fetch.rank)
        having = holders(facts, key.owner, key.window, key.slot)
        assert sorted(fetch.sources) == sorted(having)
        assert process is None or process.process not in having - {fetch.source}
        begin = plan.start(fetch.rank.pp)
        origin = plan.origin(fetch.rank.pp)
        waits = any(each.live.window == plan.window for each in facts.stage(fetch.rank.pp))
        converts = origin is Origin.WINDOW or (origin is Origin.KEPT and waits)
        if converts and key.window == plan.window and key.step >= begin:
            found.setdefault(fetch.rank, []).append(key.slot)
    for slots in found.values():  # those of other sources come after each other
        assert sorted(slots) == [*range(min(slots), plan.window.size)]
    return {rank: min(slots) for rank, slots in found.items()}


def with_ledger(facts: Facts, first: int, last: int) -> set[int]:
    """Returns the processes that have every ledger entry of [first, last]."""
    wanted = set(range(first, last + 1))
    return {each.process for each in facts.processes if wanted <= set(each.ledger)}


def logged(facts: Facts, stage: int, direction: Direction) -> set[int]:
    """Returns the steps that every rank of a stage has in its log."""
    steps = [
        {step for log in each.logs if log.direction is direction for step in log.steps}
        for each in facts.stage(stage)
    ]
    return set.intersection(*steps)


def neighbours(layout: Layout, stage: int) -> Iterator[tuple[Direction, int]]:
    """Yields from whom a stage receives; interleaved chunks close the pipeline to a ring."""
    closed = layout.chunks > 1 and layout.pp > 1
    if stage > 0 or closed:
        yield Direction.FORWARD, (stage - 1) % layout.pp
    if stage < layout.pp - 1 or closed:
        yield Direction.BACKWARD, (stage + 1) % layout.pp


def learnt_windows(facts: Facts) -> list[Window]:
    """Returns what each process learnt to be persisted."""
    return [each.persisted for each in facts.processes if each.persisted is not None]


def persisted_windows(facts: Facts) -> list[Window]:
    """Returns the windows of which somebody has a slot and that are persisted for the job."""
    newest = max(learnt_windows(facts), default=None)
    held = {held.window for each in facts.processes for held in each.holdings}
    return [window for window in held if newest is not None and window <= newest]


def target_of(facts: Facts) -> int:
    """Returns the newest step that any process knows to be committed."""
    return max(each.committed for each in facts.processes if each.committed is not None)
