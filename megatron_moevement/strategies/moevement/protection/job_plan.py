# SPDX-License-Identifier: Apache-2.0
"""The plan of a protected job: what every rank has to agree on before the first snapshot."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from megatron_moevement.errors import MoEvementError, UserError
from megatron_moevement.policy.copies.memory_budget import MemoryAccount, check_budget
from megatron_moevement.policy.copies.placement import Host, Placement, Strictness, place_replicas
from megatron_moevement.policy.copies.retention import LAG, max_log_steps, max_replayed_steps
from megatron_moevement.policy.job.operators import Inventory, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.watching.schedule_maker import room_for_windows
from megatron_moevement.policy.window.popularity import room_for
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.schedule_document import encoded_bytes
from megatron_moevement.policy.window.skipping_schedule import first_schedule
from megatron_moevement.policy.window.slot_room import RankRoom
from megatron_moevement.runtime.coordination.agreement import (
    all_gather_json,
    broadcast_json,
    gather_unlike,
)
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.transport.transport import Address
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.moevement.protection.members import (
    LogShape,
    Member,
    RankSizes,
    log_shapes,
    ring_shapes,
    sizes_reader,
)
from megatron_moevement.strategies.moevement.protection.reserve import ReserveSizes
from megatron_moevement.strategies.moevement.protection.spares import Spare
from megatron_moevement.strategies.strategy import RecoveryAbortedError

ENTRY_BYTES = 16 << 10
"""Room for a ledger entry in the journal, without what is known of the experts."""


class UnlikePlansError(MoEvementError, RuntimeError):
    """Ranks planned the same job differently: their slots would not fit together."""


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """What a plan is made from.

    Attributes:
        members: all ranks, in their order.
        train_iters: the last step.
    """

    settings: FaultTolerance
    members: Sequence[Member]
    ends: Ends
    train_iters: int

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest W that there is room for."""
        return self.settings.min_window, self.settings.max_window

    @cached_property
    def basis(self) -> str:
        """Digest of what the schedule and all sizes follow from; restarts change none of it."""
        windows = [*self.settings.first_windows, *self.limits]
        first = f"{windows} {self.ends.value} {self.train_iters}"
        digest = hashlib.sha256(first.encode())
        for member in self.members:
            digest.update(f"\n{member.host.rank} {member.sizes}".encode())
        return digest.hexdigest()


class Found(NamedTuple):
    """What of a plan takes a while to find; a process that lacks it gets it from another one.

    Attributes:
        slots: of the operators, in their order.
        room: of ranks, once for those of equal sizes, in the order of the members.
    """

    slots: Sequence[int]
    room: Sequence[RankRoom]

    @classmethod
    def of(cls, job: PlannedJob, plan: JobPlan) -> Found:
        """Returns what a plan has of it."""
        operators = plan.schedule.inventory.sorted_operators
        alike = {member.sizes: member.host.occupied for member in job.members}
        rooms = [plan.room[rank] for rank in alike.values()]
        return cls([plan.schedule.slots[op] for op in operators], rooms)

    def document(self) -> list[Any]:
        """Returns it as JSON has it."""
        return [self.slots, [room.document() for room in self.room]]

    @classmethod
    def of_document(cls, document: Sequence[Any]) -> Found:
        """Returns what a document has."""
        slots, room = document
        return cls(slots, list(map(RankRoom.of_document, room)))

    def room_of(self, members: Sequence[Member]) -> Mapping[LogicalRank, RankRoom]:
        """Returns the room of each rank.

        Raises:
            ValueError: it is of members with other sizes.
        """
        alike = dict.fromkeys(member.sizes for member in members)
        rooms = dict(zip(alike, self.room, strict=True))
        return {member.host.occupied: rooms[member.sizes] for member in members}


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """What is captured, and who keeps copies for whom; the same on every rank.

    Attributes:
        schedule: in which slot each operator is FULL.
        hosts: all processes, those that wait for a place and keep copies included.
        room: of each rank for what it captures.
        logs: sizes of the upstream logs of the ranks that have one.
        basis: of the job that it was made for.
        limit_bytes: host memory that a process may take; None without a limit.
        spares: processes without a rank that keep copies.
        warning: that copies are fewer than asked for, and why; None where they are not.
    """

    schedule: WindowSchedule
    hosts: tuple[Host, ...]
    placement: Placement
    rings: Mapping[LogicalRank, RingShape]
    journal: JournalShape
    room: Mapping[LogicalRank, RankRoom] = dataclasses.field(default_factory=dict)
    logs: Mapping[LogicalRank, LogShape] = dataclasses.field(default_factory=dict)
    basis: str = ""
    limit_bytes: int | None = None
    spares: tuple[Spare, ...] = ()
    warning: str | None = None

    @property
    def addresses_of_spares(self) -> Mapping[int, Address]:
        """Where processes without a rank keep copies."""
        return {spare.process: spare.address for spare in self.spares}

    def kept_for(self, process: int) -> tuple[LogicalRank, ...]:
        """Returns the ranks whose slots a process keeps copies of."""
        return tuple(sorted(rank for rank in self.placement.holders if self.keeps(process, rank)))

    def keeps(self, process: int, rank: LogicalRank) -> bool:
        """Returns whether a process keeps copies of a rank's slots."""
        return process in self.placement.holders.get(rank, ())

    @cached_property
    def kept_counts(self) -> Mapping[int, int]:
        """For each process that keeps copies: of how many ranks."""
        return Counter(chain.from_iterable(map(set, self.placement.holders.values())))

    def account_of(self, host: Host) -> MemoryAccount:
        """Returns the host memory that a process takes, all of it from the start."""
        return MemoryAccount(
            own_slots_bytes=0 if host.rank is None else self.rings[host.rank].total_bytes,
            held_slots_bytes=self._held_bytes.get(host.process, 0),
            logs_bytes=0 if (log := self.log_of(host)) is None else log.total_bytes,
            ledger_bytes=self.journal.total_bytes,
        )

    @cached_property
    def _held_bytes(self) -> Mapping[int, int]:
        """For each process the bytes of the rings in which it keeps copies."""
        held: Counter[int] = Counter()
        for rank, holders in self.placement.holders.items():
            for process in {*holders}:
                held[process] += self.rings[rank].total_bytes
        return held

    def accounts(self) -> Mapping[int, MemoryAccount]:
        """Returns the host memory of each process."""
        return {host.process: self.account_of(host) for host in self.hosts}

    def with_holder(self, rank: LogicalRank, process: int) -> JobPlan:
        """Returns the plan of a process that keeps copies of a rank, too."""
        holders = dict(self.placement.holders)
        holders[rank] = (*holders[rank], process)
        return dataclasses.replace(
            self, placement=dataclasses.replace(self.placement, holders=holders)
        )

    @property
    def largest(self) -> ReserveSizes:
        """What any rank takes at most, now or when spares that keep copies have become ranks."""
        return ReserveSizes(
            max(ring.total_bytes for ring in self.rings.values()),
            max((log.total_bytes for log in self.logs.values()), default=0),
            max([self.placement.replicas, *self.kept_counts.values()]),
        )

    def reserve_of(self, process: int) -> ReserveSizes:
        """Returns what a process without a rank makes of that, beside the copies that it keeps."""
        return self.largest.beside(self.kept_counts.get(process, 0))

    def check_limit(self, *processes: int) -> None:
        """Checks that processes take no more host memory than they may.

        Raises:
            UserError: one would.
        """
        if self.limit_bytes is not None:
            accounts = self.accounts()
            check_budget({process: accounts[process] for process in processes}, self.limit_bytes)

    def within_limit(self) -> JobPlan:
        """Returns the plan of a job that goes on, with as many copies as processes have room for.

        Raises:
            RecoveryAbortedError: there is no room for one copy of each rank's slots.
        """
        try:
            self.check_limit(*(host.process for host in self.hosts))
        except UserError as error:
            if (fewer := self.placement.replicas - 1) < 1:
                raise RecoveryAbortedError(str(error)) from error
        else:
            return self
        lowered = dataclasses.replace(
            self,
            placement=place_replicas(self.hosts, fewer),
            warning=f"processes have no room for {fewer + 1} copies of each slot within "
            f"--moevement-host-memory-limit-gb: keeping {fewer}",
        )
        return lowered.within_limit()

    def log_of(self, host: Host) -> LogShape | None:
        """Returns the sizes of a process's upstream log, None when it has none."""
        return None if host.rank is None else self.logs.get(host.rank)


def agree_on_plan(
    settings: FaultTolerance, own: Member, ends: Ends, train_iters: int, device: torch.device
) -> JobPlan:
    """Plans the job with all other ranks; every rank calls it.

    Raises:
        UserError: there are too few failure domains, or a process would take too much memory.
        UnlikePlansError: on all ranks, if one planned other slots.
    """
    members = [Member.of_document(each) for each in all_gather_json(own.document(), device)]
    plan = plan_of(PlannedJob(settings, members, ends, train_iters))
    check_alike(gather_unlike(plan.schedule.digest, device))
    return plan


def shared_plan(
    job: PlannedJob, former: JobPlan | None, bases: Sequence[str | None], device: torch.device
) -> Found | None:
    """Returns what a process has found that has planned the same job before; all ranks call it.

    Args:
        former: the newest plan of this process.
        bases: of the newest plans of all ranks.

    Returns:
        None where all have planned it, or none has.
    """
    if job.basis not in bases or {*bases} == {job.basis}:
        return None
    own = None
    if former is not None and former.basis == job.basis:
        own = Found.of(job, former).document()
    return Found.of_document(broadcast_json(own, bases.index(job.basis), device))


def plan_of(
    job: PlannedJob,
    restarts: int = 0,
    former: JobPlan | None = None,
    found: Found | None = None,
) -> JobPlan:
    """Plans a job; `check_alike` must follow.

    Args:
        restarts: of the job in place, until now. `--moevement-strict-replicas` and the limit of
            host memory refuse to begin a job; one that has lost processes keeps fewer copies.
        former: a plan of this process; what it has of the same job stays.
        found: in a plan of the same job by others; None: to be found.

    Raises:
        UserError: there are too few failure domains, or a process would take too much memory.
        RecoveryAbortedError: the same in a restart, with one copy of each rank's slots.
    """
    settings, members = job.settings, job.members
    if former is None or former.basis != job.basis:
        former = _sized(job, found)
    is_strict = settings.moevement_strict_replicas and not restarts
    strictness = Strictness.REFUSE if is_strict else Strictness.LOWER
    spares = tuple(spare for member in members for spare in member.spares)
    hosts = (*(member.host for member in members), *(spare.host for spare in spares))
    placement = place_replicas(hosts, settings.moevement_replicas, strictness)
    plan = dataclasses.replace(
        former,
        hosts=hosts,
        placement=placement,
        limit_bytes=settings.host_memory_limit_bytes,
        spares=spares,
        warning=placement.warning,
    )
    if restarts:
        return plan.within_limit()
    plan.check_limit(*(host.process for host in hosts))
    return plan


def _sized(job: PlannedJob, found: Found | None) -> JobPlan:
    """Returns the plan of a job with its schedule and all sizes, and without any holder."""
    read = sizes_reader()
    sizes = {member.host.occupied: read(member.sizes) for member in job.members}
    schedule = _schedule(job, sizes, None if found is None else found.slots)
    least, largest = job.limits
    if found is None:
        room = room_for_windows(schedule, range(least, largest + 1))
    else:
        room = found.room_of(job.members)
    operators = schedule.inventory.sorted_operators
    experts = sum(one.kind is OperatorKind.EXPERT for one in operators)
    return JobPlan(
        schedule=schedule,
        hosts=(),
        placement=Placement({}, 0, 0),
        rings=ring_shapes(largest, sizes, room),
        journal=JournalShape(
            max_replayed_steps(largest, LAG) + 2,
            ENTRY_BYTES + room_for(experts),
            job.train_iters,
            encoded_bytes(len(operators)),
        ),
        room=room,
        # A full ring waits behind the passes of a step: as if copies took one step longer.
        logs=log_shapes(max_log_steps(largest, LAG + 1), sizes),
        basis=job.basis,
    )


def _schedule(
    job: PlannedJob, sizes: Mapping[LogicalRank, RankSizes], slots: Sequence[int] | None
) -> WindowSchedule:
    both = frozenset({OperatorId(OperatorKind.EMBEDDING), OperatorId(OperatorKind.HEAD)})
    operators = {rank: own.operators for rank, own in sizes.items()}
    inventory = Inventory(operators, (both,) if job.ends is Ends.TIED else ())
    windows = job.settings.first_windows
    if slots is not None:
        known = dict(zip(inventory.sorted_operators, slots, strict=True))
        # Planned with an empty slot at most where no smaller W was allowed.
        return WindowSchedule(inventory, max(1 + max(slots), windows[-1]), known)
    return first_schedule(inventory, windows)


def check_alike(digests: Sequence[str]) -> None:
    """Checks that all ranks have the same schedule.

    Args:
        digests: of their schedules; none where they were found to be alike.

    Raises:
        UnlikePlansError: one has another.
    """
    unlike = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if unlike:
        raise UnlikePlansError(
            f"ranks 0 and {unlike[0]} planned different windows: operators would be in other "
            "slots on some replicas"
        )
