# SPDX-License-Identifier: Apache-2.0
"""A job that loses processes goes on in the others, with the bits of one that loses none."""

import dataclasses
import re
import socket
import time
from random import Random

import pytest

from megatron_moevement.integrations.nvrx.control_store import request_restart
from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.log_lines import log_lines
from tests.harness.protected_run import Case, plans_of
from tests.harness.restarted_run import (
    RESTARTABLE,
    await_step,
    check_survivors,
    check_verdicts,
    control_of,
    events_of,
    generation_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)
OTHERS = (
    Case.of("pp2-ep2 fp16 distributed-overlap bias", 2),
    Case.of("vpp2 bf16 replicated-overlap", 3),
    Case.of("pp2-ep2 fp32 replicated recomputed evaluation", 4),
    Case.of("tp2-ep2 bf16 distributed-overlap", 2),
)
STATE_FLUSHED = 75


def lose_ranks(server, text, uninterrupted, folder, case, ranks, seed, *, forget=True):
    """Kills the processes of ranks one after the other; returns the run and the pids left."""
    random = Random(f"{case.name} {seed}")
    program = restartable_program(case, server, text, len(ranks))
    run = Run(program, folder)
    lost = []
    with run.start() as job:
        for number, rank in enumerate(ranks):
            await_step(run, job, case.protected_from + 3 * number)
            lost.append(kill_rank(run, job, rank, random, forget=forget))
        result = job.wait()
        pids = [pid for process, pid in enumerate(job.pids) if process not in lost]
    codes = [code for process, code in enumerate(result.exit_codes) if process not in lost]
    assert codes == [0] * len(codes), result.describe()
    assert [result.exit_codes[process] for process in lost] == [-9] * len(lost)
    assert digest_differences(run._digest(), uninterrupted(case)) == []
    assert list(run.store.rglob("*")) == []
    return run, pids


@pytest.mark.slow
def test_spares_take_the_places_of_killed_processes_and_no_bit_changes(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run, pids = lose_ranks(
        megatron_fork_server, text, uninterrupted, tmp_path, CASE, [2, 0], seed=1
    )
    survivors = {
        event.pid for event in events_of(run, EventName.PROCESS_START, 0) if event.pid in pids
    }
    assert len(survivors) == 2
    check_survivors(run, sorted(survivors), generations=2)
    check_verdicts(run, CASE, restarts=2)


def test_without_a_spare_the_survivors_stop_and_a_relaunch_loses_nothing(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    program = restartable_program(CASE, megatron_fork_server, text, 1)
    run = Run(program, tmp_path)
    random = Random(2)
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        lost = [kill_rank(run, job, 3, random)]
        await_step(run, job, CASE.protected_from + 5)
        lost.append(kill_rank(run, job, 1, random))
        result = job.wait()
        survivors = [job.pids[0], job.pids[2]]
    check_survivors(run, survivors, generations=1)
    check_verdicts(run, CASE, restarts=1)
    codes = [code for process, code in enumerate(result.exit_codes) if process not in lost]
    assert codes == [STATE_FLUSHED] * 3, result.describe()
    committed = max(event.iteration for event in events_of(run, EventName.ITERATION, None))
    lost_last = f"and has 3, after rank 1 on {socket.gethostname()} (process {lost[1]})"
    for rank in result.ranks:
        if rank.exit_code == STATE_FLUSHED:
            line = rank.stderr.splitlines()[-1]
            assert lost_last in line
            step = int(re.search(r"its newest step is (\d+); ", line)[1])
            assert committed - 1 <= step <= committed + 1
            assert f"`moevement report {run.events}` shows what happened" in line
    flushed = run.checkpoints / "moevement" / "flushed"
    assert len(list(flushed.glob("*/process-*"))) == 3
    assert list(run.store.rglob("*")) == []
    assert digest_differences(run.finish(), uninterrupted(CASE)) == []
    last = plans_of(run)[-1]
    assert (last["verdict"], last["target"] >= committed) == ("GLOBAL", True)
    assert list(run.store.rglob("*")) == []
    assert list(flushed.rglob("process-*")) == []


def interrupted(server, text, folder, case, times, seed):
    """Interrupts a job at moments that are drawn; returns the run and its digest."""
    random = Random(seed)
    run = Run(restartable_program(case, server, text, 0), folder)
    with run.start() as job:
        await_step(run, job, 1)
        for number in range(times):
            before = generation_of(run)
            time.sleep(random.uniform(0, 0.8))
            request_restart(control_of(job), before, job.secret)
            while generation_of(run) == before:
                job.poll()
                assert not job.has_ended, job.wait().describe()
            if number % 4 == 3:
                await_step(run, job, max_step(run) + 1)
        job.wait().check()
    return run, run._digest()


def max_step(run):
    return max(event.iteration for event in events_of(run, EventName.ITERATION, None))


@pytest.mark.parametrize(
    ("times", "seed"),
    [(3, 1), *((16, seed) for seed in range(2, 6))],
)
@pytest.mark.slow
def test_interrupts_at_any_instruction_change_no_bit_and_leave_nothing_open(
    megatron_fork_server, text, uninterrupted, tmp_path, times, seed
):
    case = dataclasses.replace(CASE, deaths=times)
    run, digest = interrupted(megatron_fork_server, text, tmp_path, case, times, seed)
    assert digest_differences(digest, uninterrupted(case)) == []
    lived = events_of(run, EventName.FAULT_DETECTED, None)
    for pid in {event.pid for event in lived}:
        counts = [
            (event.fields["threads"], event.fields["descriptors"])
            for event in lived
            if event.pid == pid
        ]
        early = [max(one[kind] for one in counts[:4]) for kind in (0, 1)]
        late = [max(one[kind] for one in counts[-4:]) for kind in (0, 1)]
        # Groups of the newest few generations may still wait for the reaper.
        assert all(now <= 2 * before for now, before in zip(late, early, strict=True)), counts
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["fetch@2#1", "replay@0#1", "dense@2#1", "commit@3#1", "barrier@1#1", "fetch@1#2"]
)
def test_a_death_in_the_recovery_of_another_one_changes_no_bit(
    megatron_fork_server, text, uninterrupted, tmp_path, fault
):
    steps = range(CASE.protected_from - CASE.window, CASE.train_iters)
    faults = [f"{step}:{fault}" for step in steps]
    program = restartable_program(CASE, megatron_fork_server, text, 3)
    run = Run(program, tmp_path)
    with run.start("--moevement-faults", *faults) as job:
        await_step(run, job, CASE.protected_from)
        kill_rank(run, job, 2, Random(fault))
        if fault.endswith("#2"):
            while generation_of(run) < 1:
                job.poll()
            kill_rank(run, job, 1, Random(fault))
        result = job.wait()
    dead = 3 if fault.endswith("#2") else 2
    assert sorted(result.exit_codes) == [-9] * dead + [0] * (7 - dead), result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
def test_a_fault_before_any_step_is_committed_everywhere_begins_anew(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    program = restartable_program(CASE, megatron_fork_server, text, 1)
    run = Run(program, tmp_path)
    with run.start("--moevement-faults", "1:barrier@1") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    (plan, *_) = events_of(run, EventName.PLAN, 1)
    assert (plan.fields["verdict"], plan.fields["lost_steps"]) == ("ROLLBACK", 0)


@pytest.mark.slow
def test_a_fault_that_struck_a_dead_process_is_no_fault_that_never_struck(
    megatron_fork_server, text, tmp_path
):
    program = restartable_program(CASE, megatron_fork_server, text, 1)
    run = Run(program, tmp_path)
    faults = ("2:after-barrier@1", "exception:4:barrier@0#1", "5:gather@1#9")
    with run.start("--moevement-faults", *faults) as job:
        result = job.wait()
    # All that live say the same, and the one that was killed has nothing more to say.
    assert sorted(result.exit_codes) == [-9, 1, 1, 1, 1], result.describe()
    output = "".join(rank.stderr for rank in result.ranks)
    (line,) = [line.text for line in log_lines(output) if "never struck" in line.text]
    assert line.startswith("--moevement-faults: kill:5:gather@1#9 never struck")
    struck = events_of(run, EventName.FAULT_INJECTED, generation=None)
    assert [(one.generation, one.fields["kind"]) for one in struck] == [
        (0, "kill"),
        (1, "exception"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
@pytest.mark.parametrize("seed", range(3))
def test_any_rank_may_be_lost_at_any_time(
    megatron_fork_server, text, uninterrupted, tmp_path, case, seed
):
    random = Random(f"{case.name} {seed}")
    ranks = [random.randrange(case.combination.world_size) for _ in range(2)]
    run, _ = lose_ranks(
        megatron_fork_server, text, uninterrupted, tmp_path, case, ranks, seed, forget=seed % 2 == 0
    )
    check_verdicts(run, case, restarts=2)


def test_what_another_generation_would_find_too_ends_the_job_at_once(
    megatron_fork_server, text, tmp_path
):
    program = CASE.protected_program(megatron_fork_server, text, *RESTARTABLE)
    run = Run(program, tmp_path)
    with run.start("--moevement-replication-interface=203.0.113.7") as job:
        result = job.wait()
    assert set(result.exit_codes) == {2}, result.describe()
    assert "--moevement-replication-interface 203.0.113.7" in result.ranks[0].stderr
    assert generation_of(run) == 0
