# SPDX-License-Identifier: Apache-2.0
"""Preflight: what nodes take is the sum of what processes take, and what is too much is refused."""

import dataclasses

import pytest

from megatron_moevement.policy.copies.memory_budget import MemoryAccount
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.preflight.forecast import Cluster, JobForecast, ProcessForecast
from megatron_moevement.policy.preflight.obstacles import Machine, obstacles
from megatron_moevement.policy.window.schedule import WindowSchedule

RANKS = (LogicalRank(0), LogicalRank(1))
GATES = [OperatorId(OperatorKind.GATE, layer) for layer in range(4)]
INVENTORY = Inventory({RANKS[n]: tuple(Operator(one, 12, 2) for one in GATES) for n in (0, 1)})
ACCOUNTS = (MemoryAccount(100, 200, 30, 4), MemoryAccount(100, 100, 60, 4), MemoryAccount(0, 50))
ROOMY = Machine("/dev/shm/store", 10**6, 10**6, None, files_in_memory=True)


def schedule(window):
    """Returns a schedule in which the last operators share a slot where there are too few."""
    return WindowSchedule(INVENTORY, window, {one: n % window for n, one in enumerate(GATES)})


def forecast(cluster=None, **changes):
    """Returns that of two ranks and a spare, each on a node, unless told otherwise."""
    cluster = cluster or Cluster(3, 1, 1)
    processes = tuple(
        ProcessForecast(
            Host(number, cluster.domain_of(number), rank),
            cluster.node_of(number),
            account,
            reserve_bytes=0 if rank else 130,
            state_bytes=1000 if rank else 0,
        )
        for number, (account, rank) in enumerate(zip(ACCOUNTS, (*RANKS, None), strict=True))
    )
    usual = JobForecast(processes, schedule(4), (2, 2), 1, 100, computes_on_host=False)
    return dataclasses.replace(usual, **changes)


def test_processes_are_numbered_node_by_node():
    cluster = Cluster(nodes=2, per_node=3, spares=1)
    assert cluster.processes == 6
    assert [cluster.node_of(process) for process in range(6)] == [0, 0, 0, 1, 1, 1]
    assert len({cluster.domain_of(process) for process in range(6)}) == 2
    each = dataclasses.replace(cluster, each_is_domain=True)
    assert len({each.domain_of(process) for process in range(6)}) == 6
    named = dataclasses.replace(each, domain="rack")
    assert {named.domain_of(process) for process in range(6)} == {"rack"}


def test_processes_without_a_rank_wait_in_their_domains():
    cluster = Cluster(nodes=2, per_node=3, spares=2)
    assert cluster.waiting(4) == (Host(4, cluster.domain_of(4)), Host(5, cluster.domain_of(5)))
    assert cluster.waiting(6) == ()


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (2, 2, 4), (2, 2, -1)])
def test_a_cluster_in_which_nobody_trains_is_refused(sizes):
    with pytest.raises(ValueError, match="processes"):
        Cluster(*sizes)


def test_a_node_takes_what_its_processes_take():
    job = forecast(Cluster(1, 3, 1))
    (node,) = job.nodes.values()
    assert node.account == MemoryAccount(200, 350, 90, 8)
    assert node.file_bytes == 200 + 350 + 8
    assert (node.reserve_bytes, node.state_bytes) == (130, 2000)
    assert job.host_bytes(0) == 648
    on_host = dataclasses.replace(job, computes_on_host=True)
    assert on_host.host_bytes(0) == 2648


def test_a_process_pins_its_own_slots_and_its_log():
    assert [one.pinned_bytes for one in forecast().processes] == [130, 160, 0]


def test_slots_are_those_of_the_rank_with_the_largest_one():
    job = forecast()
    assert job.captured_bytes == (18, 16, 14, 12)
    assert (job.replayed_steps, job.persisted_step) == (7, 4)


def test_nothing_stands_in_the_way_of_a_job_that_fits():
    assert obstacles(forecast(), ROOMY) == ()
    assert obstacles(forecast(), None) == ()


def only(found, *words):
    """Asserts that there is one obstacle, and that it has some words."""
    (line,) = found
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("field", "needed", "words"),
    [
        ("file_bytes", 304, ("/dev/shm/store", "node 0 needs 304 bytes", "303 are left")),
        ("memory_bytes", 334, ("node 0 needs 334 bytes of host memory", "have 333 left")),
        ("lockable_bytes", 160, ("process 1 locks 160 bytes", "may lock 159", "ulimit -l")),
    ],
)
def test_a_machine_with_too_little_is_an_obstacle_by_one_byte(field, needed, words):
    enough = dataclasses.replace(ROOMY, **{field: needed})
    assert obstacles(forecast(), enough) == ()
    only(obstacles(forecast(), dataclasses.replace(ROOMY, **{field: needed - 1})), *words)


def test_files_on_a_disk_take_no_memory():
    tight = dataclasses.replace(ROOMY, memory_bytes=64, files_in_memory=False)
    assert obstacles(forecast(), tight) == ()
    assert obstacles(forecast(), dataclasses.replace(tight, files_in_memory=True)) != ()


def test_what_computes_on_the_host_locks_nothing():
    locked = dataclasses.replace(ROOMY, lockable_bytes=0)
    assert obstacles(forecast(computes_on_host=True), locked) == ()


def test_copies_need_a_failure_domain_more_than_there_are_copies():
    job = forecast(Cluster(3, 1, 1, domain="rack"), replicas=(2, 0))
    only(obstacles(job, ROOMY), "--moevement-replicas 2 needs 3 failure domains, there are 1")


def test_a_window_has_no_more_slots_than_the_model_has_operators():
    assert obstacles(forecast(schedule=schedule(4)), ROOMY) == ()
    wide = WindowSchedule(INVENTORY, 6, dict(zip(GATES, range(2, 6), strict=True)))
    only(obstacles(forecast(schedule=wide), ROOMY), "2 of its slots would be empty", "4 operators")


def test_a_job_is_long_enough_for_a_window_to_be_persisted():
    assert obstacles(forecast(train_iters=4), ROOMY) == ()
    only(obstacles(forecast(train_iters=3), ROOMY), "persisted at step 4", "ends at step 3")


def test_a_limit_is_checked_as_the_job_checks_it():
    assert obstacles(forecast(limit_bytes=334), ROOMY) == ()
    only(obstacles(forecast(limit_bytes=333), ROOMY), "process 0 needs 334 bytes", "take 333")


def test_every_obstacle_is_found_at_once():
    narrow = dataclasses.replace(ROOMY, file_bytes=0, memory_bytes=0, lockable_bytes=0)
    assert len(obstacles(forecast(train_iters=1, replicas=(2, 1), limit_bytes=1), narrow)) == 6
