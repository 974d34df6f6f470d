# SPDX-License-Identifier: Apache-2.0
"""Experts are ordered anew while a job trains; what is counted, and every bit, outlives a fault."""

import dataclasses

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.settings.faults import FaultPoint
from tests.harness.default_run import slow_but
from tests.harness.interruption import Run, digest_differences
from tests.harness.localized_run import LocalizedJob, LocalizedRun, Loss, W, differences
from tests.harness.protected_run import Case, check_replays, die

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = dataclasses.replace(Case.of("pp2-ep2 bf16 distributed bias", 4), deaths=1)


def popularity_of(events):
    """Returns what ranks learnt at window edges, by step: one thing each, whoever tells it."""
    found = {}
    for event in read_events(events):
        if event.event is EventName.POPULARITY:
            told = (event.fields["digest"], event.fields["total"], event.fields["asks_for_order"])
            found.setdefault(event.iteration, set()).add(told)
            is_listed = event.fields["asks_for_order"] and event.logical_rank == 0
            scores = event.fields.get("scores", [])
            assert sum(scores) == (event.fields["total"] if is_listed else 0)
            assert len(scores) % event.fields.get("experts", 1) == 0
    assert all(len(told) == 1 for told in found.values())
    return found


def versions_of(events):
    """Returns from which step on which schedules were in force, of all ranks."""
    return {
        event.fields["version"]: (event.fields["first_step"], event.fields["digest"])
        for event in read_events(events)
        if event.event is EventName.SCHEDULE
    }


def test_all_ranks_go_by_another_order_and_counts_outlive_a_kill_of_all(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    flags = ("--moevement-order=decayed",)
    program = CASE.protected_program(megatron_fork_server, text, *flags)
    whole, broken = Run(program, tmp_path / "whole"), Run(program, tmp_path / "broken")
    assert digest_differences(whole.finish(), uninterrupted(CASE)) == []
    die(broken, CASE, FaultPoint.GATHER, [15])
    versions = versions_of(broken.events)
    assert any(first <= 12 for first, _ in versions.values())
    assert digest_differences(broken.finish(), uninterrupted(CASE)) == []
    check_replays(broken, CASE, launches=1)
    learnt = popularity_of(whole.events)
    assert popularity_of(broken.events) == learnt
    assert list(learnt) == list(range(4, CASE.train_iters + 1, 4))
    assert versions_of(whole.events)


JOB = LocalizedJob.of(
    *("pp2-ep2 bf16 replicated bias", 4, 2, 3, "--untie-embeddings-and-output-weights"),
    "--expert-model-parallel-size=1",
    "--moevement-order=hard",
)
TRAIN_ITERS = 20
LOSSES = {
    "behind the edge": Loss((2,), (1,), everybody="12:gather", target=12),
    "at the edge": Loss((2,), (1,), behind=(0, 3), rolled=1, everybody="12:gather", target=12),
    "in the window": Loss((0,), (0,), everybody="17:prepare", target=16),
}
"""Windows begin at 0, 3, 6, 9, 12 and 15."""


def protection(folder):
    """Returns the flags of a protected job that nothing befalls."""
    return (
        "--moevement-strategy=moevement",
        f"--moevement-window={W}",
        "--moevement-replicas=1",
        f"--moevement-store-dir={folder}/store",
        f"--moevement-event-dir={folder}/events",
        "--moevement-run-id=test",
    )


@pytest.mark.parametrize("name", slow_but((), LOSSES))
def test_what_a_lost_stage_has_counted_is_counted_in_its_replay(
    megatron_fork_server, text, tmp_path, plainly_trained, name
):
    whole = LocalizedRun(megatron_fork_server, JOB, text, TRAIN_ITERS, tmp_path / "whole")
    whole.train((), *protection(whole.folder))
    run = LocalizedRun(megatron_fork_server, JOB, text, TRAIN_ITERS, tmp_path / "broken")
    found = run.train([LOSSES[name]])
    assert differences(found, plainly_trained(JOB, TRAIN_ITERS)) == []
    run.check([LOSSES[name]], found)
    assert popularity_of(run.folder / "events") == popularity_of(whole.folder / "events")
    assert versions_of(run.folder / "events")
