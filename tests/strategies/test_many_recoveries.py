"""Fifty recoveries in one job: nothing grows in the processes that live through all of them."""

import dataclasses
import signal
import time
from random import Random

import pytest

from megatron_moevement.integrations.nvrx.stores import request_restart
from megatron_moevement.runtime.events import EventName
from megatron_moevement.testing.interruption import Run, send
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
STUCK_S = 90.0
"""Longer than the time limit of a group."""
GROWTH_BYTES = 500_000
"""Of a process, for each recovery: what an allocator keeps, and records of steps."""
CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)


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


def observe(job, rank_pid):
    """Returns what each process of a job has open, once former groups had time to end."""
    time.sleep(REAPED_S)
    job.poll()
    assert not job.has_ended, job.wait().describe()
    return {pid: ProcessResources.of(pid) for pid in children_of(parent_of(rank_pid))}


def grown(run, first, last):
    """Returns what counts of processes are larger than they were, spares that joined aside."""
    starts = events_of(run, EventName.PROCESS_START, None)
    newcomers = {one.pid for one in starts if one.generation > 0}
    return [
        (pid, kind, getattr(first[pid], kind), getattr(last[pid], kind))
        for pid in (first.keys() & last.keys()) - newcomers
        for kind in ("threads", "descriptors", "sockets", "shared_files")
        if getattr(last[pid], kind) > getattr(first[pid], kind)
    ]


def test_nothing_grows_over_fifty_recoveries(megatron_fork_server, text, tmp_path):
    # A group that is stuck ends with its time limit.
    flags = ("--distributed-timeout-minutes=1",)
    program = restartable_program(CASE, megatron_fork_server, text, len(KILLED), *flags)
    program = dataclasses.replace(program, train_iters=100_000, timeout_s=500.0)
    run = Run(program, tmp_path)
    random = Random(5)
    seen = []
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        starts = events_of(run, EventName.PROCESS_START, 0)
        survivors = [one.pid for one in starts if one.logical_rank not in KILLED.values()]
        for number in range(1, RECOVERIES + 1):
            restart(run, job, number, random)
            if number % OBSERVED_EVERY == 0:
                seen.append(observe(job, survivors[0]))
        deadline = time.monotonic() + STUCK_S
        while grown(run, seen[0], seen[-1]) and time.monotonic() < deadline:
            seen.append(observe(job, survivors[0]))
        send(job, signal.SIGTERM, range(len(job.pids)))
        result = job.wait()
    for pid in survivors:
        print(*(one[pid] for one in seen), sep="\n")
    faults = events_of(run, EventName.FAULT_DETECTED, None)
    print("stuck groups:", [(one.pid, one.fields["stuck_groups"]) for one in faults[-8:]])
    assert sorted(result.exit_codes) == [-9] * len(KILLED) + [0] * 4, result.describe()
    assert list(run.store.rglob("*")) == []
    assert set(survivors) <= seen[0].keys() & seen[-1].keys()
    assert len(seen[-1]) <= len(seen[0])
    assert grown(run, seen[0], seen[-1]) == []
    for pid in survivors:
        # The first generations fill the arenas of the allocator.
        growth = seen[-1][pid].own_bytes - seen[1][pid].own_bytes
        assert growth <= GROWTH_BYTES * (RECOVERIES - 2 * OBSERVED_EVERY), (pid, growth)
