"""Protecting: who keeps copies in a generation, and the copies that training waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.copies.placement import Placement, kept_placement
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import RankPlan
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.testing.world.process import At, Commands, Join, Process, Until

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


def agree_on_holders(world: World, process: Process, members: tuple[int, ...]) -> Commands:
    """Lets copies stay with the processes that hold them, and fills the gaps."""

    def combine(held: dict[int, dict[LogicalRank, int]]) -> Placement:
        hosts = [world.processes[number].host for number in sorted(held)]
        anew = world.policies.place_replicas(hosts, world.scenario.replicas)
        copies = [(number, *one) for number in held for one in held[number].items()]
        return kept_placement(anew, hosts, copies)

    own: dict[LogicalRank, int] = {}
    for key in process.store.slots:
        if key.owner != process.store.rank:
            own[key.owner] = max(key.step, own.get(key.owner, 0))
    placement: Any = yield Join(("started",), members, process.number, own, combine)
    process.acknowledgements = world.policies.acknowledgements()
    process.holders = ()
    if process.rank is not None:
        process.holders = placement.holders[process.rank]
        world.invariants.placed(process, members)


def send_slots(world: World, process: Process, own: RankPlan, began_with: tuple[int, ...]) -> None:
    """Sends own slots to the holders that lack them."""
    for send in own.sends:
        lacking = [each for each in process.holders if each in send.to or each not in began_with]
        having = set(process.holders).difference(lacking)
        acknowledgements = process.acknowledgements.landed(send.slot, lacking, having)
        process.acknowledgements = acknowledgements
        for holder in lacking:
            world.replicator.send(process, process, send.slot, holder)


def rejoin(
    world: World, process: Process, own: RankPlan | None, members: tuple[int, ...]
) -> Commands:
    """Waits for a copy of each slot of the guarded window, then for everybody."""

    def is_protected() -> bool:
        guarded = None if own is None else own.guarded
        return guarded is None or process.acknowledgements.has_second_holder(guarded)

    if process.capturing is not None:
        yield Until(lambda: process.capturing is None, "the capture")
    yield At(FaultPoint.REPROTECT)
    yield Until(is_protected, "urgent copies")
    yield At(FaultPoint.REJOIN)
    yield Join(("protected",), members, process.number, None, len)
    yield Join(("account",), members, process.number, None, len)
