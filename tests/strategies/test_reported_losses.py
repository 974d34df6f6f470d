# SPDX-License-Identifier: Apache-2.0
"""A loss names the process, its place, its machine and the reason; a recovery the whole outage."""

import dataclasses
import socket
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_moevement.integrations.nvrx.control_store import request_restart
from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    control_of,
    events_of,
    generation_of,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = dataclasses.replace(Case.of("vpp2", 2), deaths=1)
DYING = Path(__file__).with_name("dying_reader_pretrain.py")


def test_a_loss_and_its_outage_are_reported(megatron_fork_server, text, tmp_path):
    struck = CASE.protected_from + 2
    flags = ("--moevement-replicas=1", "--moevement-faults", f"{struck}:backward@1")
    program = restartable_program(CASE, megatron_fork_server, text, 1, *flags)
    run = Run(program, tmp_path)
    curves = tmp_path / "curves"
    with run.start("--tensorboard-dir", str(curves)) as job:
        ranks = job.wait().ranks
    assert [rank.exit_code for rank in ranks] == [0, -9, 0]
    (fault,) = events_of(run, EventName.FAULT_DETECTED, generation=1)
    host = socket.gethostname()
    (loss,) = fault.fields["losses"]
    assert (loss["process"], loss["rank"], loss["host"]) == (1, 1, host)
    assert loss["reason"].startswith("its process has ended")  # who notices first is chance
    assert fault.fields["last_step_s"] < fault.fields["noticed_s"]
    lines = ranks[0].stderr.splitlines()
    (line,) = (one for one in lines if " loss of " in one)
    assert f"loss of process 1 (rank 1) on {host}: its process has ended" in line
    recovered = events_of(run, EventName.RECOVERED, generation=1)
    survivor = next(event for event in recovered if event.logical_rank == 0)
    outage_s = fault.fields["noticed_s"] - fault.fields["last_step_s"]
    assert survivor.fields["breakdown_s"]["detect"] == pytest.approx(outage_s)
    assert any("resumed at step" in one and "(detect " in one for one in lines)
    check_drawn(curves, recovered[0])
    protection = [
        event
        for event in events_of(run, EventName.PROTECTION, generation=None)
        if event.logical_rank == 0
    ]
    assert [event.fields["spares"] for event in protection] == [1, 0]
    assert "0 spares left" in "".join(lines)
    last = CASE.train_iters
    assert lines[-1].endswith(f"done: iteration {last} of {last} is trained")
    assert ranks[2].stderr.count("done:") == 0


def test_who_dies_as_it_reads_for_all_is_lost_with_the_generation(
    megatron_fork_server, text, tmp_path
):
    program = restartable_program(CASE, megatron_fork_server, text, 1)
    run = Run(dataclasses.replace(program, path=DYING), tmp_path)
    mark = tmp_path / "died"
    with run.start(f"--died={mark}") as job:
        await_step(run, job, CASE.protected_from)
        request_restart(control_of(job), 0, job.secret)
        result = job.wait()
    assert mark.exists()
    assert sorted(result.exit_codes) == [-9, 0, 0], result.describe()
    assert generation_of(run) == 1
    faults = events_of(run, EventName.FAULT_DETECTED, generation=1)
    found = {tuple(loss["process"] for loss in fault.fields["losses"]) for fault in faults}
    assert found == {(result.exit_codes.index(-9),)}


def check_drawn(curves, recovered):
    """Checks that a recovery is in TensorBoard, from a process that was a spare before."""
    accumulator = EventAccumulator(str(curves))
    accumulator.Reload()
    drawn = {
        name.removeprefix("moevement/recovery-"): accumulator.Scalars(name)
        for name in accumulator.Tags()["scalars"]
        if name.startswith("moevement/recovery-")
    }
    assert {point.step for points in drawn.values() for point in points} == {recovered.iteration}
    assert len(drawn.pop("time")) == 1
    (replayed,) = drawn.pop("replayed-steps")
    assert replayed.value > 0
    assert {name: [point.value for point in points] for name, points in drawn.items()} == {
        "generation": [1.0],
        f"verdict/{recovered.fields['verdict']}": [1.0],
    }
