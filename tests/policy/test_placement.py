# SPDX-License-Identifier: Apache-2.0
"""Placement of copies: other failure domains, even load, little movement after a loss."""

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.placement import (
    Host,
    Placement,
    Strictness,
    place_replicas,
    repair_placement,
    replace_holder,
)
from megatron_moevement.policy.job.ranks import LogicalRank


def ranks(count):
    return [LogicalRank(dp=number) for number in range(count)]


def hosts_of(domains, spares=0):
    """Returns a host for each domain named, the last `spares` of them without a rank."""
    active = len(domains) - spares
    return [
        Host(process, domain, LogicalRank(dp=process) if process < active else None)
        for process, domain in enumerate(domains)
    ]


@st.composite
def clusters(draw):
    domains = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14))
    return hosts_of(domains, draw(st.integers(0, len(domains) - 1)))


REPLICAS = st.integers(0, 4)


def assert_valid(placement, hosts):
    domain_of = {host.process: host.domain for host in hosts}
    for host in hosts:
        if host.rank is not None:
            holders = placement.holders[host.rank]
            domains = [domain_of[process] for process in holders]
            assert len(holders) == placement.replicas
            assert len({*domains, host.domain}) == placement.replicas + 1
    assert placement.holders.keys() == {host.rank for host in hosts} - {None}


@given(clusters(), REPLICAS)
def test_copies_lie_in_different_domains_and_r_is_as_large_as_can_be(hosts, replicas):
    placement = place_replicas(hosts, replicas)
    assert_valid(placement, hosts)
    domains = {host.domain for host in hosts}
    assert placement.replicas == min(replicas, len(domains) - 1)
    assert (placement.warning is None) == (len(domains) > replicas)


@given(clusters(), REPLICAS)
def test_the_order_of_hosts_is_of_no_account(hosts, replicas):
    assert place_replicas(hosts, replicas) == place_replicas(hosts[::-1], replicas)


@given(st.integers(1, 4), st.integers(2, 6), st.data())
def test_with_domains_of_equal_size_everybody_holds_r_copies(size, num_domains, data):
    replicas = data.draw(st.integers(1, num_domains - 1))
    hosts = hosts_of([str(number % num_domains) for number in range(size * num_domains)])
    placement = place_replicas(hosts, replicas)
    load = Counter(process for holders in placement.holders.values() for process in holders)
    assert {load[host.process] for host in hosts} == {replicas}


@given(clusters(), REPLICAS)
def test_while_no_domain_is_too_big_nobody_holds_more_than_r_copies(hosts, replicas):
    placement = place_replicas(hosts, replicas)
    largest = max(Counter(host.domain for host in hosts).values())
    load = Counter(process for holders in placement.holders.values() for process in holders)
    if largest * (placement.replicas + 1) <= len(hosts):
        assert all(copies <= placement.replicas for copies in load.values())


def test_processes_outside_of_a_big_domain_share_its_copies_evenly():
    hosts = hosts_of(["a"] * 6 + ["b", "c", "c"])
    placement = place_replicas(hosts, 1)
    load = Counter(placement.holders[LogicalRank(dp=number)][0] for number in range(6))
    assert sorted(load.values()) == [2, 2, 2]


def test_spares_hold_copies():
    hosts = hosts_of(["a", "b", "c"], spares=2)
    assert set(place_replicas(hosts, 2).holders[LogicalRank()]) == {1, 2}


def test_too_few_domains_give_one_warning_or_are_refused():
    hosts = hosts_of(["a", "a", "b"])
    placement = place_replicas(hosts, 2)
    assert placement.replicas == 1
    assert placement.warning == ("2 replicas need 3 failure domains, there are 2: keeping 1")
    with pytest.raises(UserError, match="--moevement-strict-replicas: 2 replicas need 3"):
        place_replicas(hosts, 2, Strictness.REFUSE)
    place_replicas(hosts, 1, Strictness.REFUSE)


@pytest.mark.parametrize(
    ("hosts", "replicas", "message"),
    [
        ([Host(0, "a")], -1, "at least 0"),
        ([Host(0, "a"), Host(0, "b")], 1, "two hosts have process 0"),
        ([Host(0, "a", LogicalRank()), Host(1, "b", LogicalRank())], 1, "two hosts have rank"),
    ],
)
def test_contradictions_are_refused(hosts, replicas, message):
    with pytest.raises(ValueError, match=message):
        place_replicas(hosts, replicas)


def without(hosts, lost):
    """Returns the hosts after a loss; spares take the lost ranks while there are any."""
    staying = [host for host in hosts if host.process not in lost]
    for host in hosts:
        if host.process in lost and host.rank is not None:
            spare = next((other for other in staying if other.rank is None), None)
            if spare is None:
                return None
            staying[staying.index(spare)] = Host(spare.process, spare.domain, host.rank)
    return staying


@given(clusters(), REPLICAS, st.sets(st.integers(0, 13), max_size=4))
def test_a_repair_is_valid_and_moves_nothing_that_can_stay(hosts, replicas, lost):
    before = place_replicas(hosts, replicas)
    staying = without(hosts, lost)
    if not staying:
        return
    after = repair_placement(before, staying)
    assert_valid(after, staying)
    assert after.replicas == min(replicas, len({host.domain for host in staying}) - 1)
    domain_of = {host.process: host.domain for host in staying}
    for host in staying:
        if host.rank is not None and after.replicas == before.replicas:
            kept = {
                process
                for process in before.holders[host.rank]
                if domain_of.get(process, host.domain) != host.domain
            }
            assert kept <= set(after.holders[host.rank])


@given(clusters(), REPLICAS)
def test_without_a_loss_a_repair_changes_nothing(hosts, replicas):
    placement = place_replicas(hosts, replicas)
    assert repair_placement(placement, hosts) == placement


def test_gaps_are_spread_over_the_processes_with_the_fewest_copies():
    hosts = [*hosts_of(["a"] * 4), Host(4, "b"), Host(5, "b"), Host(6, "c"), Host(7, "c")]
    before = place_replicas(hosts, 1)
    staying = [host for host in hosts if host.domain != "b"]
    after = repair_placement(before, staying)
    load = Counter(process for holders in after.holders.values() for process in holders)
    assert load == {6: 2, 7: 2}


def test_r_grows_again_when_a_domain_comes_back():
    few = hosts_of(["a", "b"])
    lowered = place_replicas(few, 2)
    more = [*few, Host(7, "c")]
    assert repair_placement(lowered, more).replicas == 2
    assert_valid(repair_placement(lowered, more), more)


@given(clusters(), st.integers(1, 3))
def test_a_silent_holder_is_replaced_in_a_domain_of_its_own(hosts, replicas):
    placement = place_replicas(hosts, replicas)
    domain_of = {host.process: host.domain for host in hosts}
    rank = hosts[0].rank
    if rank is None or not placement.holders[rank]:
        return
    silent = placement.holders[rank][0]
    after = replace_holder(placement, hosts, rank, silent)
    holders = after.holders[rank]
    domains = [domain_of[process] for process in holders]
    assert silent not in holders
    assert len({*domains, hosts[0].domain}) == len(holders) + 1
    others = {host.domain for host in hosts if host.process != silent} - {hosts[0].domain}
    assert len(holders) == min(placement.replicas, len(others))
    assert {r: h for r, h in after.holders.items() if r != rank} == {
        r: h for r, h in placement.holders.items() if r != rank
    }


def test_only_a_holder_can_be_replaced():
    hosts = hosts_of(["a", "b", "c"])
    with pytest.raises(ValueError, match="holds no copies"):
        replace_holder(place_replicas(hosts, 1), hosts, LogicalRank(), 0)


def chosen_one_by_one(staying, wanted, owner, hosts, load):
    """Adds the hosts with the fewest copies, in domains of their own, looking at all each time."""
    chosen = list(staying)
    taken = {host.domain for host in hosts if host.process in chosen} | {owner.domain}
    while len(chosen) < wanted:
        candidates = [host for host in hosts if host.domain not in taken]
        if not candidates:
            break
        best = min(candidates, key=lambda host: (load[host.process], host.process))
        load[best.process] += 1
        taken.add(best.domain)
        chosen.append(best.process)
    return tuple(chosen)


def staying_holders(former, owner, domain_of):
    taken, staying = {owner.domain}, []
    for process in former:
        if (domain := domain_of.get(process)) is not None and domain not in taken:
            taken.add(domain)
            staying.append(process)
    return staying


@pytest.mark.parametrize("seed", range(40))
def test_gaps_go_to_the_least_loaded_process_of_all(seed):
    generator = random.Random(seed)
    count, domains = generator.randint(2, 40), generator.randint(2, 9)
    numbers = generator.sample(range(100), count)
    before = [
        Host(process, f"node{generator.randrange(domains)}", LogicalRank(dp=number))
        for number, process in enumerate(numbers)
    ]
    placement = place_replicas(before, generator.randint(0, 3))
    new = (
        dataclasses.replace(host, process=100 + host.process) if generator.random() < 0.3 else host
        for host in before
    )
    spares = [Host(300 + n, f"node{generator.randrange(domains)}") for n in range(4)]
    hosts = [*new, *spares]
    generator.shuffle(hosts)
    domain_of = {host.process: host.domain for host in hosts}
    load = Counter(process for held in placement.holders.values() for process in held)
    possible = min(placement.requested, len({host.domain for host in hosts}) - 1)
    wanted = {}
    for host in sorted((host for host in hosts if host.rank), key=lambda host: host.rank):
        former = placement.holders[host.rank]
        staying = staying_holders(former, host, domain_of)[:possible]
        wanted[host.rank] = chosen_one_by_one(staying, possible, host, hosts, load)
    repaired = repair_placement(placement, hosts)
    assert repaired == Placement(wanted, possible, placement.requested)
    for host in hosts:
        for silent in repaired.holders.get(host.rank, ()):
            load = Counter(process for held in repaired.holders.values() for process in held)
            rest = [process for process in repaired.holders[host.rank] if process != silent]
            others = [other for other in hosts if other.process != silent]
            found = replace_holder(repaired, hosts, host.rank, silent).holders
            assert found[host.rank] == chosen_one_by_one(rest, len(rest) + 1, host, others, load)
