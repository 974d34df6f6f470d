# SPDX-License-Identifier: Apache-2.0
"""A process that hangs is lost and replaced; one that is slow is reported and goes on."""

import dataclasses
import os
import time
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    RESTARTABLE,
    await_step,
    events_of,
    generation_of,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("pp2-ep2 bf16 distributed grouped", 3)
UNTIED = "--untie-embeddings-and-output-weights"
SOFT_TIMEOUT_S, HARD_TIMEOUT_S = 5, 25
"""Far apart, so that what one of them does is not taken for what the other one does."""
TIMEOUTS = (
    f"--inprocess-soft-timeout={SOFT_TIMEOUT_S}",
    f"--inprocess-hard-timeout={HARD_TIMEOUT_S}",
    "--inprocess-barrier-timeout=60",
)
ADDED = ("progress-watchdog-interval", "monitor-process-interval", "monitor-thread-interval")
ADDED_S = sum(
    float(flag.partition("=")[2])
    for flag in RESTARTABLE
    if any(name in flag for name in (*ADDED, "last-call-wait", "termination-grace-time"))
)
"""What may come on top of a limit (docs/operate/restart.md); then SIGTERM, and SIGKILL after it."""
MARGIN_S = 5
"""Of a loaded machine."""
EARLY_S = 0.5
"""By which a sign of life may be older than the event of the step."""
STEP = CASE.protected_from + 1
"""Behind a persisted window."""
SLOW_PROGRAM = Path(__file__).with_name("slow_pretrain.py")


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def check_limits(run, stopped, killed_s):
    """Checks that the soft limit interrupted the others, and the hard one killed who hung."""
    steps = events_of(run, EventName.ITERATION, generation=0)
    last_sign_s = max(one.time for one in steps if one.logical_rank == stopped.logical_rank)
    found = events_of(run, EventName.FAULT_DETECTED, generation=1)
    assert len(found) == 3
    noticed = [event.fields["noticed_s"] for event in found]
    for limit_s, times in ((SOFT_TIMEOUT_S, noticed), (HARD_TIMEOUT_S, [killed_s])):
        assert min(times) - last_sign_s > limit_s - EARLY_S
        assert max(times) - stopped.time < limit_s + ADDED_S + MARGIN_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "flags", "verdict", "scope"),
    [
        ("prepare", (UNTIED,), "LOCALIZED", [1]),
        ("forward", (), "GLOBAL", [0, 1]),
        ("gather", (UNTIED,), "LOCALIZED", [1]),
    ],
)
def test_a_stopped_process_is_killed_and_a_spare_takes_its_place(
    megatron_fork_server, text, tmp_path, place, flags, verdict, scope
):
    expected = Run(CASE.program(megatron_fork_server, text, *flags), tmp_path / "plain").finish()
    program = restartable_program(CASE, megatron_fork_server, text, 1, *TIMEOUTS, *flags)
    run = Run(program, tmp_path / "stopped")
    with run.start("--moevement-faults", f"stop:{STEP}:{place}@2") as job:
        job.wait_for_rank(2)
        killed_s = time.time()
        result = job.wait()
    assert sorted(result.exit_codes) == [-9, 0, 0, 0, 0], result.describe()
    assert digest_differences(run._digest(), expected) == []
    (stopped,) = events_of(run, EventName.FAULT_INJECTED, generation=0)
    assert is_gone(stopped.pid)
    check_limits(run, stopped, killed_s)
    for plan in events_of(run, EventName.PLAN, generation=1):
        assert (plan.fields["verdict"], plan.fields["scope"]) == (verdict, scope)
    assert generation_of(run) == 1
    assert list(run.store.rglob("*")) == []


@pytest.mark.slow
def test_a_slow_rank_is_reported_and_goes_on(megatron_fork_server, text, tmp_path):
    small = dataclasses.replace(CASE, window=1, deaths=0)
    program = restartable_program(small, megatron_fork_server, text, 0)
    program = dataclasses.replace(
        program, path=SLOW_PROGRAM, flags=("--slow=1", *program.flags), train_iters=5
    )
    run = Run(program, tmp_path)
    with run.start() as job:
        await_step(run, job, 1)
        result = job.wait().check()
    reports = events_of(run, EventName.SLOW_RANK, generation=0)
    (report,) = [one for one in reports if one.fields["rank"] == 1]
    assert report.logical_rank == 0
    assert report.fields["own_s"] > 2 * report.fields["median_s"]
    lines = "".join(rank.stderr for rank in result.ranks).splitlines()
    assert len([line for line in lines if "rank 1 is slow: it computes" in line]) == 1
    assert generation_of(run) == 0
