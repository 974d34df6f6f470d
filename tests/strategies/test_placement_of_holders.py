# SPDX-License-Identifier: Apache-2.0
"""A loss moves the copies that the lost process held and those of its own slots, and no others."""

import dataclasses

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
RANKS = 6
WINDOW = 2
SHAPE = (
    UNTIED,
    f"--pipeline-model-parallel-size={RANKS}",
    f"--num-layers={RANKS}",
    "--expert-model-parallel-size=1",
)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_only_what_the_lost_processes_held_and_owned_moves(
    megatron_fork_server, text, tmp_path, replicas
):
    """Two processes are lost one after the other, and two spares come in."""
    case = dataclasses.replace(
        Case.of("pp2-ep2 bf16 distributed", WINDOW), replicas=replicas, deaths=1
    )
    first, second = case.protected_from + 1, case.protected_from + 2 * WINDOW + 3
    flags = (*SHAPE, f"--inprocess-active-world-size={RANKS}", "--moevement-faults")
    faults = (f"kill:{first}:backward@2", f"kill:{second}:forward@4#1")
    program = restartable_program(case, megatron_fork_server, text, 2, *flags, *faults)
    run = Run(dataclasses.replace(program, world_size=RANKS + 2), tmp_path)
    with run.start() as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, -9, *[0] * RANKS], result.describe()
    for generation, lost in ((1, 2), (2, 4)):
        recovered = events_of(run, EventName.RECOVERED, generation)
        assert {one.fields["verdict"] for one in recovered} == {"LOCALIZED"}
        moved = {one.logical_rank: one.fields["moved_copies"] for one in recovered}
        assert len(moved) == RANKS
        slots = range(WINDOW, 2 * WINDOW + 2)  # of a rank: the persisted window, and what came then
        assert moved.pop(lost) in slots
        bereft = {rank: copies for rank, copies in moved.items() if copies}
        assert len(bereft) == replicas, moved
        assert all(copies in slots for copies in bereft.values()), moved
