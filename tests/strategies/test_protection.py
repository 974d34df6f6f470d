# SPDX-License-Identifier: Apache-2.0
"""A job reports how protected it is, and `moevement status` does for it."""

import pytest

from megatron_moevement.cli import main
from megatron_moevement.runtime.observation.events import EventName
from tests.harness.interruption import Run
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

CASE = Case.of("vpp2", 2)


def status(capsys, *arguments):
    assert main(["status", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_change_of_protection_is_a_line_and_an_event(
    megatron_fork_server, text, tmp_path, capsys
):
    flags = ("--moevement-replicas=1", "--moevement-failure-domain=here")
    flags += ("--moevement-faults", f"{CASE.train_iters}:barrier")
    run = Run(CASE.protected_program(megatron_fork_server, text, *flags), tmp_path)
    with run.start() as job:
        job.wait_for_output(1, f"iteration {CASE.protected_from + 2:8d}/")
        (first, *_) = status(capsys, "--store-dir", run.store)
        result = job.wait()
    domains = "all processes are one failure domain"
    changes = events_of(run, EventName.PROTECTION, generation=0)
    assert [event.fields["level"] for event in changes] == ["no copies"]
    assert [event.logical_rank for event in changes] == [0]
    assert "2 of 2 processes of this machine live" in first
    assert domains in first
    (line,) = (one for one in result.ranks[0].stderr.splitlines() if "protection:" in one)
    assert domains in line
    assert "a loss ends the job until it is launched again" in line
    lines = status(capsys, run.events)
    assert "persisted with a lag of" in lines[0]
    assert "0 of 1 copies" in lines[1]
    (dead,) = status(capsys, "--store-dir", run.store)
    assert "0 of 2 processes of this machine live" in dead


def test_tied_ends_are_told_once_at_the_start(megatron_fork_server, text, tmp_path):
    tied = Run(CASE.protected_program(megatron_fork_server, text), tmp_path / "tied")
    with tied.start("--exit-interval=2") as job:
        result = job.wait().check()
    told = [line for line in result.ranks[0].stderr.splitlines() if "share the embedding" in line]
    told = [line for line in told if "protection:" not in line]
    assert len(told) == 1
    assert "--untie-embeddings-and-output-weights" in told[0]
