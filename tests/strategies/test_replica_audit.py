# SPDX-License-Identifier: Apache-2.0
"""Replicas that differ are named, with operator and step; those that are the same are compared."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("mutated_pretrain.py")
CASE = dataclasses.replace(Case.of("edp3 bf16", 3), deaths=0)
INTERVAL = 4
FLIPPED_STEP = 4


@pytest.fixture
def audits_of(megatron_fork_server, text, tmp_path):
    def audits(mutation, case, interval):
        program = case.protected_program(
            megatron_fork_server, text, f"--moevement-audit-interval={interval}"
        )
        flags = (f"--mutation={mutation}", *program.flags)
        run = Run(dataclasses.replace(program, path=PROGRAM, flags=flags), tmp_path)
        with run.start() as job:
            result = job.wait().check()
        return events_of(run, EventName.AUDIT, None), result.ranks[0].stderr

    return audits


def test_a_replica_that_differs_is_named_with_operator_and_step(audits_of):
    events, said = audits_of("flip-replica", CASE, INTERVAL)
    assert {event.logical_rank for event in events} == {0, 1, 2}
    found = {event.iteration: event.fields["differences"] for event in events}
    assert min(step for step, differences in found.items() if differences) == FLIPPED_STEP
    (difference,) = found[FLIPPED_STEP]
    assert len(difference["odd"]) == 1
    assert len(difference["ranks"]) == 3
    assert f"replicas differ in step {FLIPPED_STEP}: {difference['operator']} of " in said


@pytest.mark.slow
@pytest.mark.parametrize("levels", ["pp2-dp2-ep2 fp16", "edp3 bf16 grouped bias"])
def test_replicas_of_a_job_without_a_fault_are_the_same(audits_of, levels):
    events, said = audits_of("do-nothing", Case.of(levels, 3), 2)
    assert len({event.iteration for event in events}) > 4
    assert all(event.fields["operators"] > 0 for event in events)
    assert not any(event.fields["differences"] for event in events)
    assert "replicas differ" not in said
