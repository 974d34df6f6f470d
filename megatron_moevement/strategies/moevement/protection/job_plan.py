"""The plan of a protected job: what every rank has to agree on before the first snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_moevement.errors import MoEvementError, UserError
from megatron_moevement.integrations.megatron.slot_layout import ALIGNMENT_BYTES
from megatron_moevement.policy.copies.memory_budget import MemoryAccount, check_budget
from megatron_moevement.policy.copies.placement import Host, Placement, Strictness, place_replicas
from megatron_moevement.policy.copies.retention import max_log_steps, max_replayed_steps
from megatron_moevement.policy.copies.slot_ring import ring_capacity
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.window.ordering import Ordering, order_operators
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.window_planner import plan_window
from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.transport.transport import Address
from megatron_moevement.runtime.upstream_log.log import buffer_bytes
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.moevement.protection.spares import Spare
from megatron_moevement.strategies.strategy import RecoveryAbortedError

LAG = 1
"""Steps between the last capture of a window and the one at which it is persisted; where copies
take longer, training waits for them in front of a full ring."""

ENTRY_BYTES = 16 << 10
"""Room for a ledger entry in the journal."""


class UnlikePlansError(MoEvementError, RuntimeError):
    """Ranks planned the same job differently: their slots would not fit together."""


@dataclasses.dataclass(frozen=True)
class LogShape:
    """Sizes of an upstream log: the most steps that it retains, and the bytes of each."""

    max_steps: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory."""
        return self.max_steps * buffer_bytes(self.step_bytes)


@dataclasses.dataclass(frozen=True)
class Member:
    """What one rank tells the others of itself.

    Attributes:
        extras_bytes: room that the scalars and random streams of a slot need.
        log_bytes: what it sends over its stage's boundaries in a step; 0 without a log.
        spares: processes without a rank that keep copies, as far as this rank found any.
    """

    host: Host
    operators: tuple[Operator, ...]
    extras_bytes: int
    log_bytes: int = 0
    spares: tuple[Spare, ...] = ()

    def document(self) -> dict[str, Any]:
        """Returns the member as JSON holds it."""
        return {
            "process": self.host.process,
            "domain": self.host.domain,
            "rank": str(self.host.rank),
            "operators": [[str(op.id), op.full_bytes, op.compute_bytes] for op in self.operators],
            "extras_bytes": self.extras_bytes,
            "log_bytes": self.log_bytes,
            "spares": [spare.document() for spare in self.spares],
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Member:
        """Returns the member of a document."""
        return cls(
            Host(document["process"], document["domain"], LogicalRank.parse(document["rank"])),
            tuple(
                Operator(OperatorId.parse(name), full, compute)
                for name, full, compute in document["operators"]
            ),
            document["extras_bytes"],
            document["log_bytes"],
            tuple(map(Spare.of_document, document["spares"])),
        )


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """What is captured, and who keeps copies for whom; the same on every rank.

    Attributes:
        schedule: in which slot each operator is FULL.
        hosts: all processes, those that wait for a place and keep copies included.
        logs: sizes of the upstream logs of the ranks that have one.
        limit_bytes: host memory that a process may take; None without a limit.
        spares: processes without a rank that keep copies.
        warning: that copies are fewer than asked for, and why; None where they are not.
    """

    schedule: WindowSchedule
    hosts: tuple[Host, ...]
    placement: Placement
    rings: Mapping[LogicalRank, RingShape]
    journal: JournalShape
    logs: Mapping[LogicalRank, LogShape] = dataclasses.field(default_factory=dict)
    limit_bytes: int | None = None
    spares: tuple[Spare, ...] = ()
    warning: str | None = None

    @property
    def addresses_of_spares(self) -> Mapping[int, Address]:
        """Where processes without a rank keep copies."""
        return {spare.process: spare.address for spare in self.spares}

    def schedule_from(self, step: int, schedule_version: int) -> WindowSchedule:
        """Returns the schedule of a job whose windows begin at a step."""
        return dataclasses.replace(
            self.schedule, first_step=step, schedule_version=schedule_version
        )

    def kept_for(self, process: int) -> tuple[LogicalRank, ...]:
        """Returns the ranks whose slots a process keeps copies of."""
        holders = self.placement.holders
        return tuple(rank for rank in sorted(holders) if process in holders[rank])

    def accounts(self) -> Mapping[int, MemoryAccount]:
        """Returns the host memory that each process takes, all of it from the start."""
        return {
            host.process: MemoryAccount(
                own_slots_bytes=0 if host.rank is None else self.rings[host.rank].total_bytes,
                held_slots_bytes=sum(
                    self.rings[rank].total_bytes for rank in self.kept_for(host.process)
                ),
                logs_bytes=0 if (log := self.log_of(host)) is None else log.total_bytes,
                ledger_bytes=self.journal.total_bytes,
            )
            for host in self.hosts
        }

    def with_holder(self, rank: LogicalRank, process: int) -> JobPlan:
        """Returns the plan of a process that keeps copies of a rank, too."""
        holders = dict(self.placement.holders)
        holders[rank] = (*holders[rank], process)
        return dataclasses.replace(
            self, placement=dataclasses.replace(self.placement, holders=holders)
        )

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
    plan = plan_of(settings, members, ends, train_iters)
    check_alike(all_gather_json(plan.schedule.digest, device))
    return plan


def plan_of(
    settings: FaultTolerance,
    members: Sequence[Member],
    ends: Ends,
    train_iters: int,
    restarts: int = 0,
) -> JobPlan:
    """Plans a job; `check_alike` must follow.

    Args:
        members: all ranks, in their order.
        train_iters: the last step.
        restarts: of the job in place, until now. `--moevement-strict-replicas` and the limit of
            host memory refuse to begin a job; one that has lost processes keeps fewer copies.

    Raises:
        UserError: there are too few failure domains, or a process would take too much memory.
        RecoveryAbortedError: the same in a restart, with one copy of each rank's slots.
    """
    inventory = _inventory(members, ends)
    order = order_operators(inventory.sorted_operators, Ordering.INDEX)
    schedule = plan_window(inventory, order, window=settings.moevement_window).schedule
    is_strict = settings.moevement_strict_replicas and not restarts
    strictness = Strictness.REFUSE if is_strict else Strictness.LOWER
    found = tuple(spare for member in members for spare in member.spares)
    hosts = (*(member.host for member in members), *(spare.host for spare in found))
    capacity = ring_capacity(schedule.window, LAG)
    placement = place_replicas(hosts, settings.moevement_replicas, strictness)
    plan = JobPlan(
        schedule=schedule,
        hosts=hosts,
        placement=placement,
        rings={
            member.host.rank: RingShape(
                capacity, _buffer_bytes(schedule, member), len(member.operators) + 1
            )
            for member in members
            if member.host.rank is not None
        },
        journal=JournalShape(
            max_replayed_steps(schedule.window, LAG) + 2, ENTRY_BYTES, train_iters
        ),
        logs=_log_shapes(schedule.window, members),
        limit_bytes=settings.host_memory_limit_bytes,
        spares=found,
        warning=placement.warning,
    )
    if restarts:
        return plan.within_limit()
    plan.check_limit(*(host.process for host in hosts))
    return plan


def _log_shapes(window: int, members: Sequence[Member]) -> Mapping[LogicalRank, LogShape]:
    """Returns the sizes of the logs of the ranks that send anything over a boundary."""
    # A full ring waits behind the passes of a step: as if copies took one step longer.
    max_steps = max_log_steps(window, LAG + 1)
    return {
        member.host.rank: LogShape(max_steps, member.log_bytes)
        for member in members
        if member.host.rank is not None and member.log_bytes
    }


def check_alike(digests: Sequence[str]) -> None:
    """Checks that all ranks have the same schedule.

    Args:
        digests: of their schedules.

    Raises:
        UnlikePlansError: one has another.
    """
    unlike = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if unlike:
        raise UnlikePlansError(
            f"ranks 0 and {unlike[0]} planned different windows: operators would be in other "
            "slots on some replicas"
        )


def _inventory(members: Sequence[Member], ends: Ends) -> Inventory:
    by_rank = {
        member.host.rank: member.operators for member in members if member.host.rank is not None
    }
    both = frozenset({OperatorId(OperatorKind.EMBEDDING), OperatorId(OperatorKind.HEAD)})
    return Inventory(by_rank, (both,) if ends is Ends.TIED else ())


def _buffer_bytes(schedule: WindowSchedule, member: Member) -> int:
    """Returns the size of a rank's largest slot, alignment and extras included."""
    alignment = ALIGNMENT_BYTES * len(member.operators)
    return max(schedule.bytes_by_slot[member.host.occupied]) + alignment + member.extras_bytes
