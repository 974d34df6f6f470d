# SPDX-License-Identifier: Apache-2.0
"""The account of a real job adds up, and its recoveries to their outages, over all launches."""

import dataclasses
import json
import socket
from random import Random

import pytest

from megatron_moevement.cli.report import report_in
from megatron_moevement.cli.report_page import page_of
from megatron_moevement.policy.accounting.account import account_of
from megatron_moevement.policy.accounting.parts import RECOVERY, Part
from megatron_moevement.runtime.coordination.ledger import loss_to_hex
from megatron_moevement.runtime.observation.events import EventName, histories_in, read_events
from megatron_moevement.training.reporting.plots import losses_from_events
from tests.harness.explorer.verdicts_of_accounts import complaints_of
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    kill_occupant,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = dataclasses.replace(Case.of("vpp2 bf16 distributed", 2), deaths=1)
KINDS = ("phase", "iteration", "fault_detected", "process_end", "launched")


def ends(job, result):
    return dict(zip(job.pids, result.exit_codes, strict=True))


@pytest.fixture
def killed(megatron_fork_server, text, tmp_path):
    """Returns a job that lost a rank to SIGKILL, and how its processes ended."""
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1), tmp_path)
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        kill_rank(run, job, 1, Random(4))
        result = job.wait()
        return run, [ends(job, result)]


def without(folder, kind, target):
    """Copies events, all but those of a kind."""
    target.mkdir()
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["event"] != kind]
        (target / path.name).write_text("".join(kept))
    return target


def check_report(run, account, *, is_relaunch):
    """Checks that the page of a run would show its one loss, and what was done about it."""
    report = report_in([str(run.events)])
    (incident,) = report["incidents"]
    assert incident["is_relaunch"] is is_relaunch
    (lost,) = incident["casualties"]
    assert (lost["rank"], lost["host"]) == (1, socket.gethostname())
    assert lost["end"] == "was killed by SIGKILL"
    outage = account.outages[0]
    assert incident["duration_s"] == (outage.end_us - outage.start_us) / 1e6
    assert sum(incident["parts_s"].values()) == pytest.approx(incident["duration_s"], abs=1e-6)
    assert incident["plan"]["verdict"] == incident["recovery"]["verdict"]
    assert incident["recovery"]["verified"]
    assert incident["holders"]["window"][0] <= incident["plan"]["target"]
    assert report["layout"]["ranks_per_stage"] * report["layout"]["pp"] == account.ranks
    assert report["ending"]["code"] == 0
    assert set(report["curves"]) >= {"loss", "grad_norm", "host_bytes", "copies", "to_host"}
    assert page_of(report)


def test_a_job_that_lost_a_rank_adds_up_and_needs_every_kind_of_event_for_it(killed, tmp_path):
    run, ended = killed
    assert list(complaints_of([run.events], ended)) == []
    account = account_of(histories_in(run.events))
    assert (account.launches, account.faults, account.ranks) == (1, 1, 2)
    assert account.steps == CASE.train_iters
    (outage,) = account.outages
    survivor, dead, spare = account.processes
    assert sum(survivor.outages_us[0].values()) == outage.end_us - outage.start_us
    steps = {Part.USEFUL, Part.STALL, Part.BETWEEN}  # its own newest one may end later
    assert set(survivor.outages_us[0]) <= {*RECOVERY, Part.LOST, *steps}
    assert dead.lives[0].code == -9
    assert Part.GONE in dead.parts_us
    assert Part.SPARE in spare.parts_us
    check_report(run, account, is_relaunch=False)
    for kind in KINDS:
        assert list(complaints_of([without(run.events, kind, tmp_path / kind)], ended)), kind


@pytest.mark.slow
def test_a_job_that_records_intervals_adds_up_too(megatron_fork_server, text, tmp_path):
    flags = ("--moevement-event-interval=5", "--moevement-event-bytes=65536")
    run = Run(restartable_program(CASE, megatron_fork_server, text, 1, *flags), tmp_path)
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        kill_occupant(run, job, 1)
        ended = [ends(job, job.wait())]
    assert list(complaints_of([run.events], ended)) == []
    account = account_of(histories_in(run.events))
    assert (account.launches, account.faults, account.steps) == (1, 1, CASE.train_iters)
    records = read_events(run.events)
    steps = [one for one in records if one.event is EventName.ITERATION]
    assert max(one.fields["steps"] for one in steps) == 5
    losses, _, _ = losses_from_events(records)
    assert sorted(losses) == list(range(1, CASE.train_iters + 1))
    bits = {str(step): loss_to_hex(loss) for step, loss in losses.items()}
    assert bits == run._digest()["loss"]


def test_a_job_that_stopped_and_was_launched_again_adds_up(megatron_fork_server, text, tmp_path):
    run = Run(restartable_program(CASE, megatron_fork_server, text, 0), tmp_path)
    ended = []
    with run.start() as job:
        await_step(run, job, CASE.protected_from)
        kill_rank(run, job, 1, Random(5), forget=False)
        ended.append(ends(job, job.wait()))
    with run.start() as job:
        ended.append(ends(job, job.wait()))
    assert list(complaints_of([run.events], ended)) == []
    account = account_of(histories_in(run.events))
    assert (account.launches, account.faults, account.steps) == (2, 1, CASE.train_iters)
    assert all(one.parts_us[Part.DOWN] > 0 for one in account.processes)
    check_report(run, account, is_relaunch=True)
