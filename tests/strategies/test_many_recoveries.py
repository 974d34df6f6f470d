# SPDX-License-Identifier: Apache-2.0
"""Fifty recoveries in one job: nothing grows in the processes that live through all of them."""

import dataclasses
import itertools
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, send
from tests.harness.process_resources import (
    ProcessResources,
    children_of,
    parent_of,
)
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    events_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

RECOVERIES = 50
KILLED = {14: 0, 28: 3, 42: 0}
"""Ranks that are killed from outside; the processes of 1 and 2 live through all."""
OBSERVED_EVERY = 10
REAPED_S = 5.0
"""Until the process groups of the newest generation are gone."""
STUCK_S = 90.0
"""Longer than the time limit of a group."""
WARM = 80
"""Steps after which plain training takes no more memory: libraries keep what shapes have needed."""
GROWTH = {"resident bytes": 100_000, "allocated bytes": 25_000, "Python objects": 500}
"""Of a process, for each recovery. Measured: 28,000 to 57,000 in five runs, for an allocator leaves
holes; then 1,400 and 8,800; then 25 and 77, of which most is chance."""
CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)
RANKS, RANKS_PER_STAGE = 4, 2
LOCALIZED_AT_LEAST = 40
POLL_S = 0.2
OF_RING = {"threads": 1, "descriptors": 2, "sockets": 1, "shared_files": 1}
"""What a process has open for each rank whose copies it keeps."""
PROGRAM = Path(__file__).with_name("torn_pretrain.py")


def recover(run, job, number, random, demands):
    """Lets a rank tear its commit, or kills it, and waits for new steps of all ranks.

    Who tears a commit keeps its process and loses its state, so its stage replays.
    """
    if number in KILLED:
        kill_rank(run, job, KILLED[number], random)
    else:
        (demands / str(number % RANKS)).touch()
    while len({one.logical_rank for one in events_of(run, EventName.ITERATION, number)}) < RANKS:
        job.poll()
        assert not job.has_ended, job.wait().describe()
        time.sleep(POLL_S)


def memory(job, demands, resources, pids):
    """Returns what processes use of what grows, by the names of GROWTH.

    Args:
        job: runs.
        demands: the folder where processes note what they have allocated.
        resources: of each process.
        pids: of whom.
    """
    notes = [demands / f"{pid}.note" for pid in pids]
    for note in notes:
        note.touch()
    while any(note.exists() for note in notes):
        job.poll()
        assert not job.has_ended, job.wait().describe()
        time.sleep(POLL_S)
    found = {}
    for pid, note in zip(pids, notes, strict=True):
        allocated = note.with_suffix(".allocated").read_text().split()
        values = (resources[pid].own_bytes, *(int(one) for one in allocated))
        found[pid] = dict(zip(GROWTH, values, strict=True))
    return found


def observe(job, rank_pid):
    """Returns what each process of a job has open, once former groups had time to end."""
    time.sleep(REAPED_S)
    job.poll()
    assert not job.has_ended, job.wait().describe()
    return {pid: ProcessResources.of(pid) for pid in children_of(parent_of(rank_pid))}


def grown(run, first, last):
    """Returns what counts of processes are larger than they were, spares that joined aside.

    A process that keeps the copies of one that was killed has a ring and a connection more.
    """
    starts = events_of(run, EventName.PROCESS_START, None)
    newcomers = {one.pid for one in starts if one.generation > 0}
    return [
        (pid, kind, getattr(first[pid], kind), getattr(last[pid], kind))
        for pid in (first.keys() & last.keys()) - newcomers
        for kind, of_ring in OF_RING.items()
        if getattr(last[pid], kind) - getattr(first[pid], kind)
        > of_ring * (last[pid].held_rings - first[pid].held_rings)
    ]


def check_replays(run):
    """Checks that most recoveries made one stage replay, and that each replay was verified."""
    plans = {
        one.generation: one.fields
        for one in events_of(run, EventName.PLAN, None)
        if one.logical_rank == 0
    }
    assert sorted(plans) == list(range(1, RECOVERIES + 1))
    verdicts = Counter(fields["verdict"] for fields in plans.values())
    stages = Counter(stage for fields in plans.values() for stage in fields["scope"])
    print("verdicts:", dict(verdicts), "replays of each stage:", dict(stages))
    assert verdicts["LOCALIZED"] >= LOCALIZED_AT_LEAST
    assert min(stages[0], stages[1]) >= LOCALIZED_AT_LEAST // 2
    for event in events_of(run, EventName.RECOVERED, None):
        replays = event.logical_rank // RANKS_PER_STAGE in plans[event.generation]["scope"]
        assert event.fields["replay_verified"] is (True if replays else None)
        assert (event.fields["replayed_steps"] >= CASE.window - 1) == replays


def test_nothing_grows_over_fifty_recoveries(megatron_fork_server, text, tmp_path):
    # A group that is stuck ends with its time limit.
    flags = ("--distributed-timeout-minutes=1", "--untie-embeddings-and-output-weights")
    program = restartable_program(CASE, megatron_fork_server, text, len(KILLED), *flags)
    demands = tmp_path / "demands"
    demands.mkdir()
    program = dataclasses.replace(
        program,
        path=PROGRAM,
        flags=(*program.flags, f"--torn-when={demands}"),
        train_iters=100_000,
        timeout_s=500.0,
    )
    run = Run(program, tmp_path)
    random = Random(5)
    seen, used = [], []
    with run.start() as job:
        await_step(run, job, WARM)
        starts = events_of(run, EventName.PROCESS_START, 0)
        survivors = [one.pid for one in starts if one.logical_rank not in KILLED.values()]
        for number in range(1, RECOVERIES + 1):
            recover(run, job, number, random, demands)
            if number % OBSERVED_EVERY == 0:
                seen.append(observe(job, survivors[0]))
                used.append(memory(job, demands, seen[-1], survivors))
        deadline = time.monotonic() + STUCK_S
        while grown(run, seen[0], seen[-1]) and time.monotonic() < deadline:
            seen.append(observe(job, survivors[0]))
        send(job, signal.SIGTERM, range(len(job.pids)))
        result = job.wait()
    for pid in survivors:
        print(*(one[pid] for one in seen), *(one[pid] for one in used), sep="\n")
    faults = events_of(run, EventName.FAULT_DETECTED, None)
    print("stuck groups:", [(one.pid, one.fields["stuck_groups"]) for one in faults[-8:]])
    assert sorted(result.exit_codes) == [-9] * len(KILLED) + [0] * RANKS, result.describe()
    assert list(run.store.rglob("*")) == []
    assert set(survivors) <= seen[0].keys() & seen[-1].keys()
    assert len(seen[-1]) <= len(seen[0])
    first_rings, last_rings = (
        sum(one.held_rings for one in each.values()) for each in seen[:: len(seen) - 1]
    )
    assert last_rings <= first_rings
    check_replays(run)
    assert grown(run, seen[0], seen[-1]) == []
    for pid, kind in itertools.product(survivors, GROWTH):
        growth = (used[-1][pid][kind] - used[0][pid][kind]) / (RECOVERIES - OBSERVED_EVERY)
        assert growth <= GROWTH[kind], (pid, kind, growth)
