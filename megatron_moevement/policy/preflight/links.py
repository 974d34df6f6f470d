# SPDX-License-Identifier: Apache-2.0
"""Links: who sends to whom while links are measured, and what the measurements come to.

It is what the job does: each rank sends slots as large as its own to all holders of its copies at a
time, and all ranks do it at once.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from megatron_moevement.policy.document import Document
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.preflight.forecast import JobForecast
from megatron_moevement.policy.preflight.window_forecast import Rates

MOST_BYTES = 256 * 2**20
"""Of what is sent in place of a slot; with more, no more connections carry it."""


@dataclasses.dataclass(frozen=True)
class Greeting(Document):
    """What a process is to the others.

    Attributes:
        host: name of its machine.
        network: names its loopback interface.
        address: where it receives copies.
        domain: what it may be lost together with.
    """

    host: str
    network: str
    address: str
    port: int
    domain: str


@dataclasses.dataclass(frozen=True)
class Load(Document):
    """What a rank sends in place of its slots.

    Attributes:
        parts: that have a checksum each, at least one.
    """

    owner: LogicalRank
    slot_bytes: int
    parts: int


@dataclasses.dataclass(frozen=True)
class Holder(Document):
    """A process that copies are sent to, and where it receives them."""

    process: int
    address: str
    port: int


@dataclasses.dataclass(frozen=True)
class LinkTask(Document):
    """What one process does while links are measured.

    Attributes:
        own: what it copies and sends; None for a spare.
        holders: to whom.
        received: what others send to it.
    """

    own: Load | None
    holders: tuple[Holder, ...]
    received: tuple[Load, ...]


@dataclasses.dataclass(frozen=True)
class Sent(Document):
    """How fast copies came to a holder, acknowledgements included."""

    process: int
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Unsent(Document):
    """Why copies did not come to a holder."""

    process: int
    reason: str


@dataclasses.dataclass(frozen=True)
class LinkReport(Document):
    """What one process has measured.

    Attributes:
        to_host_bytes_per_s: of copies into its memory and their checksums; None for a spare, and
            where copies failed before any counted.
    """

    to_host_bytes_per_s: float | None
    sent: tuple[Sent, ...]
    unsent: tuple[Unsent, ...]


def link_tasks(forecast: JobForecast, greetings: Mapping[int, Greeting]) -> dict[int, LinkTask]:
    """Returns what each process does, by who keeps copies for whom in the job.

    Args:
        greetings: of all processes.
    """
    loads = {
        one.host.process: _load(forecast, one.host.rank)
        for one in forecast.processes
        if one.host.rank is not None
    }
    holders = {process: forecast.holders.get(load.owner, ()) for process, load in loads.items()}
    received: defaultdict[int, list[Load]] = defaultdict(list)
    for process, load in loads.items():
        for holder in holders[process]:
            received[holder].append(load)
    return {
        process: LinkTask(
            loads.get(process),
            tuple(
                Holder(each, greetings[each].address, greetings[each].port)
                for each in holders.get(process, ())
            ),
            tuple(received[process]),
        )
        for process in greetings
    }


def _load(forecast: JobForecast, rank: LogicalRank) -> Load:
    schedule = forecast.schedule
    slot_bytes = min(max(schedule.bytes_by_slot[rank]), MOST_BYTES)
    return Load(rank, slot_bytes, max(len(schedule.inventory.by_rank[rank]), 1))


@dataclasses.dataclass(frozen=True)
class NodeLinks:
    """What the processes of a node measured to one address of a node.

    Attributes:
        count: pairs of processes.
        slowest_bytes_per_s: of the slowest pair.
        median_bytes_per_s: of all pairs.
    """

    sender: int
    holder: int
    address: str
    count: int
    slowest_bytes_per_s: float
    median_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class MeasuredLinks:
    """What all processes have measured."""

    greetings: Mapping[int, Greeting]
    reports: Mapping[int, LinkReport]

    @property
    def to_host_bytes_per_s(self) -> tuple[float, ...]:
        """Of all ranks, the slowest first."""
        rates = (report.to_host_bytes_per_s for report in self.reports.values())
        return tuple(sorted(rate for rate in rates if rate is not None))

    @property
    def rates(self) -> Rates | None:
        """Of the worst rank; None where no rank has copied anything."""
        sent = (one.bytes_per_s for report in self.reports.values() for one in report.sent)
        slowest = min(sent, default=None)
        to_host = self.to_host_bytes_per_s
        return Rates(to_host[0], slowest) if to_host else None

    @property
    def obstacles(self) -> Iterator[str]:
        """Why copies don't come to their holders, a sentence each."""
        for process, report in sorted(self.reports.items()):
            for one in report.unsent:
                receiver = self.greetings[one.process]
                yield (
                    f"process {process} on {self.greetings[process].host} can't send copies to "
                    f"process {one.process} on {receiver.host} at {receiver.address}: "
                    f"{one.reason}; mend the network between them, or give another "
                    "--moevement-replication-interface"
                )

    def between_nodes(self, node_of: Callable[[int], int]) -> tuple[NodeLinks, ...]:
        """Returns what was measured from node to node, the slowest first.

        Args:
            node_of: returns the node of a process.
        """
        found: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
        for process, report in self.reports.items():
            for one in report.sent:
                address = self.greetings[one.process].address
                found[node_of(process), node_of(one.process), address].append(one.bytes_per_s)
        links = [
            NodeLinks(*where, len(rates), min(rates), statistics.median(rates))
            for where, rates in found.items()
        ]
        return tuple(sorted(links, key=lambda one: (one.slowest_bytes_per_s, one.sender)))
