# SPDX-License-Identifier: Apache-2.0
"""Drawn faults: a seed decides all of them, whatever else changes."""

import itertools
import statistics
import subprocess
import sys
from datetime import timedelta

import pytest

from megatron_moevement.policy.faults.failure_trace import Failure
from megatron_moevement.policy.faults.fault_schedule import FaultKind, poisson_faults, trace_faults

MTBF = timedelta(seconds=10)
KILL = (FaultKind.KILL,)


def first(count, mtbf=MTBF, world_size=8, kinds=tuple(FaultKind), seed=1):
    return list(itertools.islice(poisson_faults(mtbf, world_size, kinds, seed), count))


def failures(*losses, alive=100):
    return [Failure(timedelta(minutes=n), lost, alive) for n, lost in enumerate(losses, start=1)]


def test_a_seed_draws_the_same_faults_and_another_one_others():
    assert first(50) == first(50)
    assert first(50) != first(50, seed=2)


def test_another_process_with_another_hash_seed_draws_the_same():
    program = (
        "import itertools, datetime as d;"
        "from megatron_moevement.policy.faults.fault_schedule import *;"
        "faults = poisson_faults(d.timedelta(seconds=10), 8, tuple(FaultKind), 1);"
        "print(list(itertools.islice(faults, 50)))"
    )
    drawn = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert drawn.stdout.decode().strip() == str(first(50))


def test_the_rate_does_not_decide_who_is_struck_nor_how():
    slow = first(50, mtbf=10 * MTBF)
    assert [(f.rank, f.kind) for f in slow] == [(f.rank, f.kind) for f in first(50)]
    for one, other in zip(slow, first(50), strict=True):
        assert one.at.total_seconds() == pytest.approx(10 * other.at.total_seconds(), rel=1e-4)


def test_the_kinds_do_not_decide_when_nor_who():
    assert [(f.at, f.rank) for f in first(50, kinds=KILL)] == [(f.at, f.rank) for f in first(50)]


def test_gaps_are_as_a_poisson_process_has_them():
    faults = first(4000)
    gaps = [b.at - a.at for a, b in itertools.pairwise(faults)]
    seconds = [gap.total_seconds() for gap in gaps]
    assert statistics.mean(seconds) == pytest.approx(10, rel=0.05)
    assert statistics.stdev(seconds) == pytest.approx(10, rel=0.1)
    counts = [sum(fault.rank == rank for fault in faults) for rank in range(8)]
    assert min(counts) > 400
    assert {fault.kind for fault in faults} == set(FaultKind)


def test_a_trace_strikes_at_its_times_divided_by_the_speed():
    at = [fault.at for fault in trace_faults(failures(1, 1), 4, KILL, 1, speed=60.0)]
    assert at == [timedelta(seconds=1), timedelta(seconds=2)]


@pytest.mark.parametrize(
    ("world_size", "lost", "struck"), [(4, 1, 1), (4, 25, 1), (4, 50, 2), (4, 100, 4), (64, 10, 6)]
)
def test_a_failure_takes_as_large_a_part_of_the_ranks_as_of_the_nodes(world_size, lost, struck):
    ranks = [fault.rank for fault in trace_faults(failures(lost), world_size, KILL, 1)]
    assert len(ranks) == len(set(ranks)) == struck
    assert set(ranks) <= set(range(world_size))


def test_a_seed_decides_the_victims_of_a_trace():
    losses = failures(*[1] * 30)
    victims = [[fault.rank for fault in trace_faults(losses, 8, KILL, seed)] for seed in (1, 1, 2)]
    assert victims[0] == victims[1] != victims[2]
    assert set(victims[0]) == set(range(8))
