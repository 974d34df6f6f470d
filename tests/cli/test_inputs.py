# SPDX-License-Identifier: Apache-2.0
"""What commands that read events are given: the folder of events, or the one that it is in."""

import re

import pytest

from megatron_moevement.cli import main
from megatron_moevement.cli.inputs import event_folder
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.job.ranks import Layout
from tests.harness.synthetic_run import Shape, SyntheticRun

READERS = (
    *(["account"], ["explain"], ["losses"], ["recoveries"], ["report", "--json"], ["status"]),
    ["watch", "--once"],
)


@pytest.fixture
def run_dir(tmp_path):
    shape = Shape(layout=Layout(pp=2, dp=2), spares=2, steps=40, faults=2)
    SyntheticRun(shape).write(tmp_path / "run" / "events")
    return tmp_path / "run"


def printed(capsys, command, folder):
    """Returns what a command prints of a folder, but for how long ago things were."""
    assert main([*command, str(folder)]) == ExitCode.DONE
    return re.sub(r"\d+ s ago|\d+ days.*|\d+:\d+:\d+", "", capsys.readouterr().out)


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_the_folder_of_a_run_is_as_good_as_that_of_its_events(run_dir, capsys, command):
    shown = printed(capsys, command, run_dir)
    assert shown == printed(capsys, command, run_dir / "events")
    assert len(shown) > 100


def test_its_own_events_come_before_those_below_it(run_dir):
    (run_dir / "own.jsonl").touch()
    assert event_folder(str(run_dir)) == run_dir
    (run_dir / "own.jsonl").unlink()
    assert event_folder(str(run_dir)) == run_dir / "events"


def test_without_events_it_is_what_was_given(tmp_path):
    assert event_folder(str(tmp_path)) == tmp_path
    (tmp_path / "events").touch()
    assert event_folder(str(tmp_path)) == tmp_path
    (tmp_path / "events").unlink()
    (tmp_path / "events").mkdir()
    assert event_folder(str(tmp_path)) == tmp_path


def test_the_page_of_a_report_lies_in_the_folder_that_was_given(run_dir, capsys):
    assert main(["report", str(run_dir)]) == ExitCode.DONE
    assert (run_dir / "report.html").is_file()
    assert f"{run_dir}/report.html: 2 outages" in capsys.readouterr().out
