# SPDX-License-Identifier: Apache-2.0
"""What a stage that stands by in a recovery does not do: take part in collectives, need memory."""

import dataclasses
from random import Random

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.collective_count import train_counting
from tests.harness.interruption import Run
from tests.harness.localized_run import TARGET, LocalizedJob, LocalizedRun, Loss
from tests.harness.process_resources import peak_bytes, reset_peak
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    events_of,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed grouped", 2)
UNTIED = "--untie-embeddings-and-output-weights"
LARGE_MODEL = (
    "--expert-model-parallel-size=1",
    UNTIED,
    "--hidden-size=256",
    "--num-experts=8",
    "--moe-ffn-hidden-size=1024",
    "--micro-batch-size=2",
)
"""A stage has 6.6 million parameters."""
MOST_GROWTH = 0.05
LOST = (1, 0)
STEPS = 2 * CASE.window + 1
"""Ordinary ones that a peak is taken over: every buffer of the ring is written in them."""


def occupant(run, rank):
    """Returns the process that occupies a rank."""
    starts = events_of(run, EventName.ITERATION, None)
    return [event.pid for event in starts if event.logical_rank == rank][-1]


def newest(run):
    return max(event.iteration for event in events_of(run, EventName.ITERATION, None))


def test_peak_memory_of_a_bystander_grows_by_less_than_five_percent(
    megatron_fork_server, text, tmp_path
):
    case = dataclasses.replace(CASE, replicas=1, deaths=8)
    program = restartable_program(case, megatron_fork_server, text, len(LOST), *LARGE_MODEL)
    program = dataclasses.replace(program, world_size=2 + len(LOST))
    run = Run(program, tmp_path)
    growth = []
    with run.start("--inprocess-active-world-size=2") as job:
        await_step(run, job, case.protected_from)
        for generation, lost in enumerate(LOST, start=1):
            bystander = occupant(run, 1 - lost)
            reset_peak(bystander)
            await_step(run, job, newest(run) + STEPS)
            ordinary = peak_bytes(bystander)
            reset_peak(bystander)
            kill_rank(run, job, lost, Random(lost))
            while not [
                event
                for event in events_of(run, EventName.RECOVERED, generation)
                if event.pid == bystander
            ]:
                job.poll()
                assert not job.has_ended, job.wait().describe()
            recovering = peak_bytes(bystander)
            growth.append(recovering / ordinary - 1)
            print(
                f"stage {1 - lost} stood by: {ordinary:,} bytes in training, "
                f"{recovering:,} in the recovery, {growth[-1]:+.2%}"
            )
            await_step(run, job, newest(run) + STEPS)
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, -9, 0, 0], result.describe()
    for event in events_of(run, EventName.RECOVERED, None):
        assert event.fields["verdict"] == "LOCALIZED"
    assert max(growth) < MOST_GROWTH


@pytest.mark.parametrize(("lost", "stage"), [(3, 1), (0, 0)])
def test_a_bystander_takes_part_in_no_collective_of_the_replay(
    megatron_fork_server, text, tmp_path, lost, stage
):
    job = LocalizedJob.of("pp2-ep2 bf16 distributed bias", 4, 2, 3, UNTIED)
    run = LocalizedRun(megatron_fork_server, job, text, TARGET + 2, tmp_path)
    found = run.train([Loss((lost,), (stage,))], function=train_counting)
    counts = [rank["collectives"] for rank in found]
    for rank, (count,) in enumerate(counts):
        assert (count > 0) == (job.stage_of(rank) == stage), counts
