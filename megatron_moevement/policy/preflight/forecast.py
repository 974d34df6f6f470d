# SPDX-License-Identifier: Apache-2.0
"""Forecast: the memory of a job that has not started, process by process and node by node.

Nothing is computed here that the job does not compute: accounts and slots are those of its plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from megatron_moevement.policy.copies.memory_budget import MemoryAccount
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.copies.retention import max_replayed_steps
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import WindowSchedule


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The machines of a job that has not started: nodes with equally many processes.

    Processes are numbered node by node; the last ones are spares.

    Attributes:
        each_is_domain: whether each process is a failure domain; otherwise each node is.
        domain: the failure domain of all processes, where one is given.
        domains: that of each process, where they have been asked; it counts more.

    Raises:
        ValueError: there would be no process, or none that trains.
    """

    nodes: int
    per_node: int
    spares: int = 0
    each_is_domain: bool = False
    domain: str | None = None
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.per_node < 1:
            raise ValueError(f"{self.nodes} nodes with {self.per_node} processes: at least 1 each")
        if not 0 <= self.spares < self.processes:
            raise ValueError(f"{self.spares} of {self.processes} processes can't be spares")

    @property
    def processes(self) -> int:
        """Processes of the job, spares counted."""
        return self.nodes * self.per_node

    def node_of(self, process: int) -> int:
        """Returns the node of a process."""
        return process // self.per_node

    def domain_of(self, process: int) -> str:
        """Returns what a process may be lost together with."""
        if self.domains:
            return self.domains[process]
        if self.domain is not None:
            return self.domain
        return f"process {process}" if self.each_is_domain else f"node {self.node_of(process)}"

    def waiting(self, ranks: int) -> tuple[Host, ...]:
        """Returns the processes without a rank: they keep copies as those with one do.

        Args:
            ranks: of the job, which the first processes have.
        """
        spares = range(ranks, self.processes)
        return tuple(Host(process, self.domain_of(process)) for process in spares)


@dataclasses.dataclass(frozen=True)
class ProcessForecast:
    """What one process takes, in bytes.

    Attributes:
        account: host memory by the job's plan.
        reserve_bytes: host memory that a spare prepares for the rank that it may take, where there
            is room.
        state_bytes: weights, gradients, master weights and moments, where the model computes;
            activations are not counted.
        saving_bytes: host memory of the copy that a checkpoint is written from beside training.
    """

    host: Host
    node: int
    account: MemoryAccount
    reserve_bytes: int
    state_bytes: int
    saving_bytes: int = 0

    @property
    def file_bytes(self) -> int:
        """Files of the store; the log lies in no file."""
        return self.account.total_bytes - self.account.logs_bytes

    @property
    def pinned_bytes(self) -> int:
        """What asynchronous copies from a device go into: own slots and log."""
        return self.account.own_slots_bytes + self.account.logs_bytes


@dataclasses.dataclass(frozen=True)
class NodeForecast:
    """What the processes of a node take together, in bytes."""

    account: MemoryAccount
    file_bytes: int
    reserve_bytes: int
    state_bytes: int
    saving_bytes: int

    @classmethod
    def of(cls, processes: Sequence[ProcessForecast]) -> NodeForecast:
        """Adds processes up."""
        names = [field.name for field in dataclasses.fields(MemoryAccount)]
        sums = {name: sum(getattr(one.account, name) for one in processes) for name in names}
        return cls(
            MemoryAccount(**sums),
            sum(one.file_bytes for one in processes),
            sum(one.reserve_bytes for one in processes),
            sum(one.state_bytes for one in processes),
            sum(one.saving_bytes for one in processes),
        )


@dataclasses.dataclass(frozen=True)
class WindowOptions:
    """What W would be chosen from, by the job or, where it has a fixed W, by one that chooses.

    Attributes:
        first: the W that a job begins with that chooses.
        slots: for each W that it may come to the bytes of the largest slot of the worst rank.
        is_chosen: whether this job chooses.
    """

    first: int = 1
    slots: Mapping[int, int] = dataclasses.field(default_factory=dict)
    is_chosen: bool = False


@dataclasses.dataclass(frozen=True)
class JobForecast:
    """What a job takes and does.

    Attributes:
        processes: ascending.
        schedule: what each iteration captures.
        replicas: r, as asked for, and what the failure domains admit.
        lag: steps between the last capture of a window and the step at which it is persisted.
        train_iters: the last step.
        computes_on_host: whether the model's state lies in host memory, too.
        limit_bytes: host memory that a process may take; None without a limit.
        windows: returns what W would be chosen from; takes about as long as planning the job.
        holders: for each rank the processes that keep copies of its slots.
        limits: the smallest and the largest W that the job may come to; None where W is fixed.
    """

    processes: tuple[ProcessForecast, ...]
    schedule: WindowSchedule
    replicas: tuple[int, int]
    lag: int
    train_iters: int
    computes_on_host: bool
    limit_bytes: int | None = None
    windows: Callable[[], WindowOptions] = WindowOptions
    holders: Mapping[LogicalRank, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    limits: tuple[int, int] | None = None

    @cached_property
    def nodes(self) -> Mapping[int, NodeForecast]:
        """What each node takes."""
        found: dict[int, list[ProcessForecast]] = {}
        for one in self.processes:
            found.setdefault(one.node, []).append(one)
        return {node: NodeForecast.of(processes) for node, processes in sorted(found.items())}

    @property
    def domains(self) -> int:
        """Failure domains."""
        return len({one.host.domain for one in self.processes})

    @property
    def replayed_steps(self) -> int:
        """Steps that a recovery replays at most."""
        largest = self.schedule.window if self.limits is None else max(self.limits)
        return max_replayed_steps(largest, self.lag)

    @property
    def persisted_step(self) -> int:
        """The step at which the first window of a job that begins at step 0 is persisted."""
        return self.schedule.window - 1 + self.lag

    @property
    def captured_bytes(self) -> tuple[int, ...]:
        """What the rank with the largest slot captures in each slot of a window."""
        return max(self.schedule.bytes_by_slot.values(), key=max)

    def host_bytes(self, node: int) -> int:
        """Returns the host memory that a node has to have."""
        found = self.nodes[node]
        state_bytes = found.state_bytes if self.computes_on_host else 0
        return found.account.total_bytes + state_bytes + found.saving_bytes
