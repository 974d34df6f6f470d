"""Fifty recoveries in one job: nothing grows in the processes that live through all of them."""

import dataclasses
import time
from random import Random

import pytest

from megatron_moevement.integrations.nvrx.stores import request_restart
from megatron_moevement.runtime.events import EventName
from megatron_moevement.testing.interruption import Run, digest_differences
from megatron_moevement.testing.process_resources import (
    ProcessResources,
    children_of,
    parent_of,
)
from megatron_moevement.testing.protected_run import Case
from megatron_moevement.testing.restarted_run import (
    await_step,
    control_of,
    events_of,
    generation_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

RECOVERIES = 50
KILLED = {14: 0, 28: 3, 42: 0}
"""Ranks that are killed instead of interrupted; the processes of 1 and 2 live through all."""
OBSERVED_EVERY = 10
REAPED_S = 5.0
"""Until the process groups of the newest generation are gone."""
GROWTH_BYTES = 200_000
"""Of a process, for each recovery: what an allocator keeps, and records of steps."""
CASE = dataclasses.replace(Case.of("pp2-ep2 bf16 distributed grouped", 3), deaths=100)


def restart(run, job, number, random):
    """Interrupts all ranks or kills one, and waits for new steps of all."""
    before = generation_of(run)
    if number in KILLED:
        kill_rank(run, job, KILLED[number], random)
    else:
        time.sleep(random.uniform(0, 0.3))
        request_restart(control_of(job), before)
    while len({one.logical_rank for one in events_of(run, EventName.ITERATION, before + 1)}) < 4:
        job.poll()
        assert not job.has_ended, job.wait().describe()
        time.sleep(0.05)


def observe(job, pids):
    """Returns what each process has open, and how many processes the job has."""
    time.sleep(REAPED_S)
    job.poll()
    assert not job.has_ended, job.wait().describe()
    processes = children_of(parent_of(pids[0]))
    return {pid: ProcessResources.of(pid) for pid in processes}


def test_nothing_grows_over_fifty_recoveries(megatron_fork_server, text, uninterrupted, tmp_path):
    program = restartable_program(CASE, megatron_fork_server, text, len(KILLED))
    run = Run(dataclasses.replace(program, timeout_s=500.0), tmp_path)
    random = Random(5)
    seen = []
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        starts = events_of(run, EventName.PROCESS_START, 0)
        survivors = [one.pid for one in starts if one.logical_rank not in KILLED.values()]
        for number in range(1, RECOVERIES + 1):
            restart(run, job, number, random)
            if number % OBSERVED_EVERY == 0:
                seen.append(observe(job, survivors))
                for pid in survivors:
                    print(number, pid, seen[-1][pid], len(seen[-1]))
        result = job.wait()
    assert sorted(result.exit_codes) == [-9] * len(KILLED) + [0] * 4, result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert list(run.store.rglob("*")) == []
    first, last = seen[0], seen[-1]
    assert len(last) <= len(first)
    for pid in first.keys() & last.keys():  # ranks, spares and monitors
        for kind in ("threads", "descriptors", "sockets", "shared_files"):
            counts = [getattr(one[pid], kind) for one in seen]
            assert counts[-1] <= counts[0], (pid, kind, counts)
        growth = last[pid].own_bytes - first[pid].own_bytes
        assert growth <= GROWTH_BYTES * (RECOVERIES - OBSERVED_EVERY), (pid, growth)
    assert set(survivors) <= first.keys() & last.keys()
