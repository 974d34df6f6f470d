# SPDX-License-Identifier: Apache-2.0
"""Links are measured between who keeps copies for whom in the job, and the worst rank counts."""

import json

import pytest

from megatron_moevement.policy.copies.memory_budget import MemoryAccount
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.preflight.forecast import Cluster, JobForecast, ProcessForecast
from megatron_moevement.policy.preflight.links import (
    MOST_BYTES,
    Greeting,
    Holder,
    LinkReport,
    LinkTask,
    Load,
    MeasuredLinks,
    NodeLinks,
    Sent,
    Unsent,
    link_tasks,
)
from megatron_moevement.policy.preflight.window_forecast import Rates
from megatron_moevement.policy.window.schedule import WindowSchedule

RANKS = (LogicalRank(0), LogicalRank(1))
GATES = [OperatorId(OperatorKind.GATE, layer) for layer in range(4)]
GREETINGS = {
    process: Greeting(f"host{process // 2}", "net", f"10.0.0.{process // 2}", 7000 + process, "d")
    for process in range(3)
}


def forecast(full_bytes=(12, 20), holders=None):
    """Returns that of two ranks and a spare, of which each rank has all gates."""
    inventory = Inventory(
        {
            rank: tuple(Operator(gate, size, 2) for gate in GATES)
            for rank, size in zip(RANKS, full_bytes, strict=True)
        }
    )
    processes = tuple(
        ProcessForecast(Host(number, "", rank), 0, MemoryAccount(0, 0, 0, 0), 0, 0)
        for number, rank in enumerate((*RANKS, None))
    )
    return JobForecast(
        processes,
        WindowSchedule(inventory, 4, {one: n for n, one in enumerate(GATES)}),
        replicas=(2, 2),
        lag=1,
        train_iters=9,
        computes_on_host=True,
        holders={RANKS[0]: (1, 2), RANKS[1]: (2, 0)} if holders is None else holders,
    )


def test_each_rank_sends_as_much_as_its_largest_slot_to_all_its_holders():
    loads = [Load(RANKS[0], 12 + 3 * 2, 4), Load(RANKS[1], 20 + 3 * 2, 4)]
    held_by = [Holder(n, one.address, one.port) for n, one in GREETINGS.items()]
    assert link_tasks(forecast(), GREETINGS) == {
        0: LinkTask(loads[0], (held_by[1], held_by[2]), (loads[1],)),
        1: LinkTask(loads[1], (held_by[2], held_by[0]), (loads[0],)),
        2: LinkTask(None, (), tuple(loads)),
    }


def test_a_job_without_copies_sends_none():
    tasks = link_tasks(forecast(holders={}), GREETINGS)
    assert [(each.holders, each.received) for each in tasks.values()] == [((), ())] * 3
    assert tasks[0].own is not None


def test_no_more_is_sent_than_needs_all_connections():
    tasks = link_tasks(forecast(full_bytes=(MOST_BYTES - 6, MOST_BYTES)), GREETINGS)
    assert [tasks[process].own.slot_bytes for process in (0, 1)] == [MOST_BYTES] * 2


def report(to_host, sent=(), unsent=()):
    return LinkReport(
        to_host,
        tuple(Sent(*each) for each in sent),
        tuple(Unsent(*each) for each in unsent),
    )


REPORTS = {
    0: report(3e9, [(1, 2e9), (2, 0.5e9)]),
    1: report(4e9, [(2, 0.7e9), (0, 5e9)]),
    2: report(None),
}


def test_the_worst_rank_counts():
    assert MeasuredLinks(GREETINGS, REPORTS).rates == Rates(3e9, 0.5e9)
    assert MeasuredLinks(GREETINGS, {0: report(3e9), 2: report(None)}).rates == Rates(3e9, None)
    assert MeasuredLinks(GREETINGS, {2: report(None)}).rates is None


def test_links_are_shown_from_node_to_address_the_slowest_first():
    found = MeasuredLinks(GREETINGS, REPORTS).between_nodes(Cluster(2, 2, 1).node_of)
    assert found == (
        NodeLinks(0, 1, "10.0.0.1", 2, 0.5e9, 0.6e9),
        NodeLinks(0, 0, "10.0.0.0", 2, 2e9, 3.5e9),
    )


def test_a_copy_that_does_not_come_is_an_obstacle():
    lost = MeasuredLinks(GREETINGS, {**REPORTS, 1: report(4e9, unsent=[(2, "timed out")])})
    (line,) = lost.obstacles
    words = "process 1 on host0 can't send copies to process 2 on host1 at 10.0.0.1: timed out; "
    assert line.startswith(words)
    assert list(MeasuredLinks(GREETINGS, REPORTS).obstacles) == []


@pytest.mark.parametrize(
    "document",
    [GREETINGS[0], *link_tasks(forecast(), GREETINGS).values(), *REPORTS.values()],
)
def test_what_processes_exchange_comes_through_json(document):
    assert type(document).of_document(json.loads(json.dumps(document.document()))) == document
