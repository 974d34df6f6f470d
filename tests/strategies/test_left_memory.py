# SPDX-License-Identifier: Apache-2.0
"""What processes leave in memory is there for whoever takes their places, in any generation."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, kill_together, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = dataclasses.replace(Case.of("vpp2 bf16 distributed", 3), deaths=1)
STEP = CASE.protected_from + 2
DIES_OPENING = Path(__file__).with_name("opening_pretrain.py")
PERMUTED = Path(__file__).with_name("permuted_pretrain.py")
STATE_FLUSHED = 75


def program(server, text, spares):
    """Returns a program whose processes leave their memory behind when they die."""
    made = restartable_program(CASE, server, text, spares)
    flags = tuple(flag for flag in made.flags if flag != "--moevement-no-adoption")
    return dataclasses.replace(made, flags=flags)


def first_steps(run, launch_generations):
    """Returns the first step that was trained in each of some generations."""
    return [
        min(event.iteration for event in events_of(run, EventName.ITERATION, generation))
        for generation in launch_generations
    ]


def plans(run):
    return {
        (event.generation, event.fields["verdict"], event.fields["target"])
        for event in events_of(run, EventName.PLAN, None)
    }


def flushed_files(folder):
    return {path: path.stat().st_size for path in folder.glob("*/process-*/*")}


@pytest.mark.slow
def test_a_death_before_the_stores_are_opened_loses_nothing_that_was_flushed(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    run = Run(program(megatron_fork_server, text, 0), tmp_path)
    with run.start("--moevement-faults", f"{STEP}:barrier@1") as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, STATE_FLUSHED], result.describe()
    flushed = run.checkpoints / "moevement" / "flushed"
    left = flushed_files(flushed)
    assert left
    result = kill_together(run, f"{STEP - 1}:replay", "--inprocess-granularity=node")
    assert result.exit_codes == (-9, -9), result.describe()
    assert "0 spares can't replace" in result.ranks[0].stderr
    assert flushed_files(flushed) == left  # no window of this launch is persisted yet
    again = program(megatron_fork_server, text, 1)
    flags = (*again.flags, "--dies-opening=1")
    run = Run(dataclasses.replace(again, path=DIES_OPENING, flags=flags), tmp_path)
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (0, -9, 0), result.describe()
    assert plans(run) == {(number, "GLOBAL", STEP - 1) for number in (0, 1)}
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert list(run.store.rglob("*")) == []
    assert list(flushed.rglob("process-*")) == []


def test_spares_go_on_where_all_ranks_died(megatron_fork_server, text, uninterrupted, tmp_path):
    run = Run(program(megatron_fork_server, text, 2), tmp_path)
    result = kill_together(run, f"{STEP}:barrier")
    assert result.exit_codes == (-9, -9, 0, 0), result.describe()
    assert plans(run) == {(1, "GLOBAL", STEP - 1)}
    assert first_steps(run, [1]) == [STEP]
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    assert list(run.store.rglob("*")) == []


@pytest.mark.parametrize("saved", [5, pytest.param(None, marks=pytest.mark.slow)])
def test_where_nothing_is_left_the_job_goes_back_to_what_it_saved_itself_and_says_so(
    megatron_fork_server, text, uninterrupted, tmp_path, saved
):
    bare = restartable_program(CASE, megatron_fork_server, text, 2, "--moevement-replicas=0")
    run = Run(bare, tmp_path)  # spares would keep copies
    flags = [f"--load={tmp_path}/nothing", *([] if saved is None else [f"--save-interval={saved}"])]
    result = kill_together(run, f"{STEP}:barrier", *flags)
    assert result.exit_codes == (-9, -9, 0, 0), result.describe()
    step = saved or 0
    (plan, other) = events_of(run, EventName.PLAN, 1)
    assert plan.fields == other.fields
    assert (plan.fields["verdict"], plan.fields["target"]) == ("ROLLBACK", step)
    assert plan.fields["lost_steps"] is None
    assert plan.fields["reason"] == (
        f"nothing is left in memory: back to the durable checkpoint of step {step}, "
        f"all steps after {step} are done again"
    )
    recovered = events_of(run, EventName.RECOVERED, 1)
    assert [(one.fields["verdict"], one.iteration) for one in recovered] == [("ROLLBACK", step)] * 2
    assert first_steps(run, [1]) == [step + 1]
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []


@pytest.mark.slow
def test_what_another_history_saved_in_the_same_folder_is_not_gone_back_to(
    megatron_fork_server, text, uninterrupted, tmp_path
):
    bare = restartable_program(CASE, megatron_fork_server, text, 2, "--moevement-replicas=0")
    run = Run(bare, tmp_path)  # spares would keep copies
    again = (f"--load={tmp_path}/nothing", "--save-interval=4")
    run.finish(*again)
    result = kill_together(run, "6:barrier", *again)
    assert result.exit_codes == (-9, -9, 0, 0), result.describe()
    assert {plan.fields["target"] for plan in events_of(run, EventName.PLAN, 1)} == {4}
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []


@pytest.mark.parametrize("replicas", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_that_are_exchanged_between_machines_find_what_they_left(
    megatron_fork_server, text, uninterrupted, tmp_path, replicas
):
    made = dataclasses.replace(program(megatron_fork_server, text, 0), path=PERMUTED)
    made = dataclasses.replace(made, flags=(*made.flags, f"--moevement-replicas={replicas}"))
    run = Run(made, tmp_path)
    machines = [str(run.store / name) for name in ("a", "b")]
    result = kill_together(run, f"{STEP}:barrier", f"--machines={','.join(machines)}")
    assert result.exit_codes == (-9, -9), result.describe()
    digest = run.finish(f"--machines={','.join(reversed(machines))}")
    assert plans(run) == {(0, "GLOBAL", STEP - 1)}
    assert digest_differences(digest, uninterrupted(CASE)) == []
    assert list(run.store.rglob("process-*")) == []
