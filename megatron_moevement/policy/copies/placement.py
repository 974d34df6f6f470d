# SPDX-License-Identifier: Apache-2.0
"""Placement: which processes keep the copies of each logical rank's slots in their host memory."""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from operator import attrgetter

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank


class Strictness(Enum):
    """What happens when there are too few failure domains for the replicas asked for."""

    LOWER = "lower"
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True, order=True)
class Host:
    """A live process that keeps slots in its host memory.

    Attributes:
        process: number of the process, unique among all processes that the job ever had.
        domain: failure domain: what is lost together, such as a node or a rack.
        rank: the logical rank that it occupies; None for a spare.
    """

    process: int
    domain: str
    rank: LogicalRank | None = None

    @property
    def occupied(self) -> LogicalRank:
        """The rank of a process that has one.

        Raises:
            ValueError: it is a spare.
        """
        if self.rank is None:
            raise ValueError(f"process {self.process} has no rank")
        return self.rank


@dataclasses.dataclass(frozen=True)
class Placement:
    """Who keeps copies of whose slots.

    Attributes:
        holders: for each logical rank the processes that keep copies of its slots, best first, in
            failure domains that differ from each other and from the rank's own. The rank's own
            process keeps its slots too and is not listed.
        replicas: r, the number of holders of every rank.
    """

    holders: Mapping[LogicalRank, tuple[int, ...]]
    replicas: int
    requested: int

    @property
    def warning(self) -> str | None:
        """What to tell the user once when there are fewer replicas than asked for."""
        if self.replicas == self.requested:
            return None
        return (
            f"{self.requested} replicas need {self.requested + 1} failure domains, there are "
            f"{self.replicas + 1}: keeping {self.replicas}"
        )


def place_replicas(
    hosts: Sequence[Host], replicas: int, strictness: Strictness = Strictness.LOWER
) -> Placement:
    """Spreads the copies of every occupied rank over processes in other failure domains.

    Spares hold copies as everybody else. When no domain has more than 1 / (r + 1) of all
    processes, no process holds copies for more than r ranks; otherwise the processes outside of
    the big domains share its load evenly. Every rank calls it with the same hosts and gets the
    same placement. Source: section 3.2, persisting snapshots.

    Args:
        hosts: the live processes, each once, in any order.
        replicas: r, the number of copies besides the rank's own.

    Raises:
        UserError: there are too few failure domains and `strictness` is REFUSE.
        ValueError: `replicas` is negative, or two processes have one number or one rank.
    """
    _check_hosts(hosts, replicas)
    sizes = Counter(host.domain for host in hosts)
    possible = min(replicas, max(len(sizes) - 1, 0))
    placement = Placement({}, possible, replicas)
    if placement.warning and strictness is Strictness.REFUSE:
        raise UserError(
            f"--moevement-strict-replicas: {replicas} replicas need {replicas + 1} failure "
            f"domains, there are {len(sizes)}; add nodes or lower --moevement-replicas"
        )
    by_domain = sorted(sorted(hosts, key=attrgetter("process")), key=attrgetter("domain"))
    largest = max(sizes.values(), default=0)
    if largest * (possible + 1) <= len(hosts):
        holders = _shift_by_domain(by_domain, possible, largest)
    else:
        holders = _choose_least_loaded(by_domain, possible, sizes)
    return dataclasses.replace(placement, holders=holders)


def _check_hosts(hosts: Sequence[Host], replicas: int) -> None:
    if replicas < 0:
        raise ValueError(f"{replicas} replicas: must be at least 0")
    for what, values in (
        ("process", [host.process for host in hosts]),
        ("rank", [host.rank for host in hosts if host.rank is not None]),
    ):
        twice = [str(value) for value, count in Counter(values).items() if count > 1]
        if twice:
            raise ValueError(f"two hosts have {what} {twice[0]}")


def _shift_by_domain(
    by_domain: Sequence[Host], replicas: int, largest: int
) -> dict[LogicalRank, tuple[int, ...]]:
    """Lets copy i of a host lie i * `largest` places further round the ring of all hosts.

    Domains are contiguous on the ring and none is longer than a shift, so no two of r + 1 places
    lie in one domain; each host is the i-th holder of one other host only.
    """
    size = len(by_domain)
    return {
        host.rank: tuple(
            by_domain[(place + copy * largest) % size].process for copy in range(1, replicas + 1)
        )
        for place, host in enumerate(by_domain)
        if host.rank is not None
    }


def _choose_least_loaded(
    by_domain: Sequence[Host], replicas: int, sizes: Mapping[str, int]
) -> dict[LogicalRank, tuple[int, ...]]:
    """Gives each copy to the host with the fewest so far; ranks of the largest domains go first."""
    least = _LeastLoaded(by_domain, {})
    return {
        host.rank: least.take(replicas, {host.domain})
        for host in sorted(by_domain, key=lambda host: (-sizes[host.domain], host.domain))
        if host.rank is not None
    }


class _LeastLoaded:
    """Hosts by how many copies they keep: of each domain those with the fewest come first.

    One is there as its place among all plus as often the number of all as it keeps copies.
    """

    def __init__(self, hosts: Sequence[Host], load: Mapping[int, int]) -> None:
        """Sorts them.

        Args:
            hosts: of equals the first is taken.
            load: how many copies processes keep; the others keep none.
        """
        self._hosts = hosts
        self._queues: defaultdict[str, list[int]] = defaultdict(list)
        for place, host in enumerate(hosts):
            self._queues[host.domain].append(load.get(host.process, 0) * len(hosts) + place)
        for queue in self._queues.values():
            heapq.heapify(queue)
        self._heads = [(queue[0], domain) for domain, queue in self._queues.items()]
        heapq.heapify(self._heads)

    def take(self, wanted: int, taken: Collection[str]) -> tuple[int, ...]:
        """Returns the processes that get one copy more each; fewer where there are no others.

        Args:
            taken: domains in which none may lie; and no two lie in the same one.
        """
        chosen: list[int] = []
        passed = []
        while len(chosen) < wanted and self._heads:
            first, domain = heapq.heappop(self._heads)
            if domain not in taken:
                heapq.heapreplace(self._queues[domain], first + len(self._hosts))
                chosen.append(self._hosts[first % len(self._hosts)].process)
            passed.append((self._queues[domain][0], domain))
        for head in passed:
            heapq.heappush(self._heads, head)
        return tuple(chosen)


class HeldCopies:
    """Which processes hold slots of which other ranks."""

    def __init__(self) -> None:
        """Nobody holds any."""
        self._steps: defaultdict[LogicalRank, dict[int, int]] = defaultdict(dict)

    def add(self, holder: int, rank: LogicalRank, step: int) -> None:
        """Adds that a process holds slots of a rank.

        Args:
            step: of the newest.
        """
        self._steps[rank][holder] = step

    @property
    def holders(self) -> Mapping[LogicalRank, tuple[int, ...]]:
        """By rank, who has the newest slots first: who was replaced as a holder has older ones."""
        return {
            rank: tuple(sorted(steps, key=lambda holder: (-steps[holder], holder)))
            for rank, steps in self._steps.items()
        }


def kept_placement(anew: Placement, hosts: Sequence[Host], held: HeldCopies) -> Placement:
    """Returns a placement that leaves copies with the processes that hold them.

    What processes hold is the placement that was in force: it outlives restarts and launches, and
    processes that come in new need not be given it.

    Args:
        anew: what `place_replicas` gives.
        held: what all processes hold.
    """
    holders = held.holders
    if not holders:
        return anew
    return repair_placement(dataclasses.replace(anew, holders=holders), hosts)


def repair_placement(placement: Placement, hosts: Sequence[Host]) -> Placement:
    """Fills the gaps that lost processes left and lets everybody else keep what they hold.

    A holder stays when it lives, and lies in a domain of its own that is not the rank's. The
    process with the fewest copies takes a gap. With domains that came back, r grows again up to
    what was asked for.

    Args:
        hosts: the live processes; a spare that has taken a rank occupies it already.
    """
    _check_hosts(hosts, placement.requested)
    possible = min(placement.requested, max(len({host.domain for host in hosts}) - 1, 0))
    load = Counter(process for holders in placement.holders.values() for process in holders)
    domain_of = {host.process: host.domain for host in hosts}
    by_rank = {host.rank: host for host in hosts if host.rank is not None}
    least = _LeastLoaded(sorted(hosts, key=attrgetter("process")), load)
    holders = {}
    for rank in sorted(by_rank):
        former, owner = placement.holders.get(rank, ()), by_rank[rank]
        staying = _staying(former, owner, domain_of)[:possible]
        if len(staying) == len(former) == possible:
            holders[rank] = former
            continue
        taken = {owner.domain, *map(domain_of.__getitem__, staying)}
        holders[rank] = (*staying, *least.take(possible - len(staying), taken))
    return Placement(holders, possible, placement.requested)


def replace_holder(
    placement: Placement, hosts: Sequence[Host], rank: LogicalRank, silent: int
) -> Placement:
    """Replaces a holder of `rank` that does not acknowledge in time.

    Returns:
        A placement in which the process with the fewest copies, in a domain of its own, has taken
        the place of `silent`; without one the rank has a holder less.

    Raises:
        ValueError: `silent` holds no copies of the rank.
    """
    if silent not in placement.holders[rank]:
        raise ValueError(f"process {silent} holds no copies of {rank}")
    others = sorted(
        (host for host in hosts if host.process != silent), key=lambda host: host.process
    )
    load = Counter(process for holders in placement.holders.values() for process in holders)
    owner = next(host for host in hosts if host.rank == rank)
    staying = [process for process in placement.holders[rank] if process != silent]
    taken = {owner.domain, *(host.domain for host in others if host.process in staying)}
    filled = (*staying, *_LeastLoaded(others, load).take(1, taken))
    return dataclasses.replace(placement, holders={**placement.holders, rank: filled})


def lacking_holders(
    lacking: Collection[int], began_with: Collection[int], holders: Sequence[int]
) -> tuple[int, ...]:
    """Returns the holders that lack a slot: some that did at first, and all that came later.

    Args:
        lacking: of the holders at the beginning of the generation.
        began_with: the holders then.
        holders: those of now.
    """
    return tuple(each for each in holders if each in lacking or each not in began_with)


def _staying(former: Iterable[int], owner: Host, domain_of: Mapping[int, str]) -> list[int]:
    taken = {owner.domain}
    staying = []
    for process in former:
        domain = domain_of.get(process)
        if domain is not None and domain not in taken:
            taken.add(domain)
            staying.append(process)
    return staying
