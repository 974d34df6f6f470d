"""Memory: how many bytes of host memory fault tolerance takes, process by process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from megatron_moevement.errors import UserError
from megatron_moevement.policy.placement import Host, Placement
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.retention import max_log_steps
from megatron_moevement.policy.ring import ring_capacity
from megatron_moevement.policy.schedule import WindowSchedule


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """Host memory of one process, in bytes.

    Attributes:
        own_slots_bytes: ring of its own rank's slots; 0 for a spare.
        held_slots_bytes: rings of the ranks that it keeps copies for.
        logs_bytes: boundary tensors that its rank sent.
        ledger_bytes: ledger entries, its own and those it keeps for others.
    """

    own_slots_bytes: int = 0
    held_slots_bytes: int = 0
    logs_bytes: int = 0
    ledger_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.own_slots_bytes + self.held_slots_bytes + self.logs_bytes + self.ledger_bytes


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """What a logical rank adds to host memory at every step, apart from its slot.

    Attributes:
        log_bytes: activations and gradients that it sends over its stage's boundaries.
        ledger_bytes: the scalars and the state of its random streams.
    """

    log_bytes: int = 0
    ledger_bytes: int = 0


def ring_bytes(schedule: WindowSchedule, rank: LogicalRank, lag: int) -> int:
    """Returns the size of the ring of a rank's slots; each buffer is as large as its worst slot.

    Args:
        schedule: the schedule in force.
        rank: whose slots.
        lag: steps between the last capture of a window and the step at which it is persisted.
    """
    return ring_capacity(schedule.window, lag) * max(schedule.bytes_by_slot[rank])


def account_memory(
    schedule: WindowSchedule,
    placement: Placement,
    hosts: Sequence[Host],
    steps: Mapping[LogicalRank, StepBytes],
    lag: int,
) -> Mapping[int, MemoryAccount]:
    """Returns the most that each process can need while the schedule is in force.

    Args:
        schedule: what is captured.
        placement: who keeps copies for whom.
        hosts: the live processes.
        steps: what each rank adds at every step; ranks that are left out add nothing.
        lag: steps between the last capture of a window and the step at which it is persisted.
    """
    rings = {rank: ring_bytes(schedule, rank, lag) for rank in schedule.inventory.ranks}
    kept_steps = max_log_steps(schedule.window, lag)
    ledgers = {
        rank: kept_steps * steps[rank].ledger_bytes if rank in steps else 0 for rank in rings
    }
    held: dict[int, list[LogicalRank]] = {}
    for rank, processes in placement.holders.items():
        for process in processes:
            held.setdefault(process, []).append(rank)
    accounts = {}
    for host in hosts:
        own = [] if host.rank is None else [host.rank]
        others = held.get(host.process, [])
        accounts[host.process] = MemoryAccount(
            own_slots_bytes=sum(rings[rank] for rank in own),
            held_slots_bytes=sum(rings[rank] for rank in others),
            logs_bytes=sum(kept_steps * steps[rank].log_bytes for rank in own if rank in steps),
            ledger_bytes=sum(ledgers[rank] for rank in (*own, *others)),
        )
    return accounts


def check_budget(accounts: Mapping[int, MemoryAccount], budget_bytes: int) -> None:
    """Checks that no process needs more host memory than it may take.

    Raises:
        UserError: a process needs more.
    """
    worst = max(accounts, key=lambda process: (accounts[process].total_bytes, -process))
    account = accounts[worst]
    if account.total_bytes > budget_bytes:
        raise UserError(
            f"process {worst} needs {account.total_bytes} bytes of host memory and may take "
            f"{budget_bytes}: {account.own_slots_bytes} for its slots, "
            f"{account.held_slots_bytes} for copies, {account.logs_bytes} for logs, "
            f"{account.ledger_bytes} for the ledger; lower --moevement-replicas or "
            "--moevement-window, or raise the budget"
        )
