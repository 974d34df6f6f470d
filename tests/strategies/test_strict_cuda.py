# SPDX-License-Identifier: Apache-2.0
"""Restarts on a CUDA runtime that raises where host memory or devices are used wrongly."""

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import await_step, events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = dataclasses.replace(Case.of("vpp2 bf16 distributed", 4), replicas=1, deaths=1)
PROGRAM = Path(__file__).with_name("strict_cuda_pretrain.py")


def strict_run(server, data, folder, spares, *flags):
    """Returns a run on the strict runtime, and the folder of the contexts of its processes."""
    contexts = folder / "contexts"
    contexts.mkdir()
    program = restartable_program(CASE, server, data, spares, *flags)
    env = {**program.env, "STRICT_CUDA": str(contexts)}
    return Run(dataclasses.replace(program, path=PROGRAM, env=env), folder / "run"), contexts


def lost_once(run, fault, uninterrupted):
    """Has a job with a spare lose a process and end with the right bits; returns it."""
    with run.start("--moevement-faults", fault) as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    return job


def holders_of(contexts):
    """Returns for each file of a context the processes that have it open."""
    found = defaultdict(set)
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = descriptor.readlink()
        except OSError:  # closed meanwhile
            continue
        if target.parent == contexts:
            found[target.name].add(int(descriptor.parts[2]))
    return found


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        pytest.param("1:barrier@1", "ROLLBACK", marks=pytest.mark.slow),
        pytest.param("4:backward@1", "GLOBAL", marks=pytest.mark.slow),
        ("14:backward@1", "GLOBAL"),
    ],
)
def test_survivors_pin_their_memory_again_on_their_own_devices(
    megatron_fork_server, text, uninterrupted, tmp_path, fault, verdict
):
    run, contexts = strict_run(megatron_fork_server, text, tmp_path, 1)
    job = lost_once(run, fault, uninterrupted)
    assert {plan.fields["verdict"] for plan in events_of(run, EventName.PLAN, 1)} == {verdict}
    assert not events_of(run, EventName.PLAN, 2)
    devices = {f"device{rank}-{pid}" for rank, pid in enumerate(job.pids)}
    assert {path.name for path in contexts.glob("device*")} == devices


def test_a_spare_pins_its_memory_before_a_rank_is_lost_and_nothing_in_the_recovery(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run, contexts = strict_run(megatron_fork_server, text, tmp_path, 1)
    job = lost_once(run, "14:backward@1", uninterrupted)
    (fault,) = events_of(run, EventName.FAULT_INJECTED, 0)
    notes = (contexts / f"pinned-{job.pids[2]}").read_text().splitlines()
    pinned = [line.split() for line in notes]
    assert sorted(thread for _, thread in pinned) == ["late-pin", "reserve"]  # slots, and log
    assert all(float(time_s) < fault.time for time_s, _ in pinned)


@pytest.mark.slow
def test_a_spare_makes_the_rings_of_copies_before_a_rank_is_lost_and_none_in_the_recovery(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run, contexts = strict_run(megatron_fork_server, text, tmp_path, 1)
    job = lost_once(run, "14:backward@1", uninterrupted)
    (fault,) = events_of(run, EventName.FAULT_INJECTED, 0)
    notes = (contexts / f"allocated-{job.pids[2]}").read_text().splitlines()
    fields = [line.split("\t") for line in notes]
    made = [(float(time_s), thread, int(size)) for time_s, thread, size in fields]
    rings = [size for _, thread, size in made if thread == "reserve"]
    assert rings == [rings[0]] * 2  # its own, and the one for copies that the dead rank kept
    assert all(time_s < fault.time for time_s, _, size in made if size > rings[0] // 2)


@pytest.mark.slow
def test_who_adopts_a_ring_pins_it_while_others_do_not_wait(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run, contexts = strict_run(megatron_fork_server, text, tmp_path, 1)
    flags = [flag for flag in run._program.flags if flag != "--moevement-no-adoption"]
    run._program = dataclasses.replace(run._program, flags=tuple(flags))
    job = lost_once(run, "14:backward@1", uninterrupted)
    notes = (contexts / f"pinned-{job.pids[2]}").read_text().splitlines()
    *reserved, adopted = (line.split()[1] for line in notes)
    assert (sorted(reserved), adopted) == (["late-pin", "reserve"], "late-pin")


def test_the_device_of_a_process_is_free_when_it_has_ended(megatron_fork_server, text, tmp_path):
    run, contexts = strict_run(megatron_fork_server, text, tmp_path, 1)
    with run.start() as job:
        await_step(run, job, 2)
        held = holders_of(contexts)
        job.wait().check()
    assert held == {f"device{rank}-{pid}": {pid} for rank, pid in enumerate(job.pids)}
