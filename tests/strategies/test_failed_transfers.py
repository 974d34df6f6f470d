# SPDX-License-Identifier: Apache-2.0
"""A transfer that fails costs no copy: a loss long afterwards costs the steps of a replay."""

import dataclasses
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.fault_cover import UNTIED
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
TROUBLED = Path(__file__).with_name("troubled_pretrain.py")
KILL = 20
WINDOW = 3


@pytest.mark.parametrize(
    ("ranks", "replicas", "failures"),
    [(2, 1, (5, 9)), pytest.param(4, 2, (5, 9, 13), marks=pytest.mark.slow)],
)
def test_a_rank_is_lost_long_after_transfers_of_its_slots_have_failed(
    megatron_fork_server, text, tmp_path, ranks, replicas, failures
):
    case = Case.of("pp2-ep2 bf16 distributed grouped", WINDOW)
    case = dataclasses.replace(case, replicas=replicas, deaths=3)
    shape = (UNTIED, f"--expert-model-parallel-size={ranks // 2}")
    faults = [f"exception:{step}:send@0" for step in failures]
    flags = (*shape, f"--inprocess-active-world-size={ranks}", "--moevement-faults", *faults)
    program = restartable_program(
        case, megatron_fork_server, text, 1, *flags, f"kill:{KILL}:backward@0"
    )
    run = Run(dataclasses.replace(program, world_size=ranks + 1), tmp_path / "protected")
    with run.start() as job:
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, *[0] * ranks], result.describe()
    persisted = events_of(run, EventName.WINDOW_PERSISTED, 0)
    assert {one.fields["copies"] for one in persisted} == {replicas}
    starts = {one.fields["start"] for one in persisted}
    assert starts == set(range(0, KILL - WINDOW, WINDOW)), "a window was persisted late or never"
    plans = events_of(run, EventName.PLAN, 1)
    assert {(plan.fields["verdict"], *plan.fields["scope"]) for plan in plans} == {("LOCALIZED", 0)}
    assert {plan.fields["window"] for plan in plans} == {max(starts)}
    replays = events_of(run, EventName.REPLAY, 1)
    assert {one.iteration for one in replays} == set(range(max(starts) + 1, KILL))
    assert all(one.fields["replay_verified"] for one in replays)
    plain = dataclasses.replace(case.program(megatron_fork_server, text, *shape), world_size=ranks)
    digest = Run(plain, tmp_path / "plain").finish()
    assert digest_differences(run._digest(), digest) == []


@pytest.mark.slow
def test_a_job_whose_only_holder_can_not_be_reached_ends_with_lines_and_its_memory(
    megatron_fork_server, text, tmp_path
):
    """Training waits for a copy; time-outs of generations hold; a relaunch loses no step."""
    case = Case.of("pp2-ep2 bf16 distributed grouped", WINDOW)
    case = dataclasses.replace(case, replicas=1, deaths=1)
    flags = (
        *(UNTIED, "--expert-model-parallel-size=1", "--inprocess-active-world-size=2"),
        *("--inprocess-soft-timeout=8", "--inprocess-hard-timeout=15"),
        "--inprocess-max-iterations=2",
    )
    program = restartable_program(case, megatron_fork_server, text, 0, *flags)
    program = dataclasses.replace(program, path=TROUBLED, world_size=2)
    run = Run(program, tmp_path)
    with run.start(f"--unreachable=0:1:{2 * WINDOW + 1}") as job:
        result = job.wait()
    assert result.exit_codes == (75, 75), result.describe()
    for line in (
        "process 1 keeps no copies of pp0.dp0.tp0.cp0.ep0 now (the link is cut on purpose)",
        "its state is in ",
    ):
        assert any(line in rank.stderr for rank in result.ranks), result.ranks[0].stderr
    persisted = [one.fields["start"] for one in events_of(run, EventName.WINDOW_PERSISTED, None)]
    assert max(persisted) == WINDOW  # the next one has slots without a copy
    newest = max(one.iteration for one in events_of(run, EventName.ITERATION, None))
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (0, 0), result.describe()
    assert f"resumed at step {newest}" in result.ranks[0].stderr
