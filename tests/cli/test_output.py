# SPDX-License-Identifier: Apache-2.0
"""What listing commands print: one document for programs, with `--json`."""

import argparse
import json
from pathlib import Path

import pytest

from megatron_moevement.cli import build_parser, main
from megatron_moevement.training.presets import PARAMETERS
from tests.cli.test_recoveries import told

ROOT = Path(__file__).resolve().parents[2]
LISTINGS = {
    "account",
    "check",
    "clean",
    "data inspect",
    "events",
    "explain",
    "inspect",
    "losses",
    "operators",
    "presets",
    "recoveries",
    "report",
    "schedule",
    "scripts",
    "status",
}
DENSE = ("--num-layers", "4", "--hidden-size", "8", "--vocab-size", "16", "--ffn-hidden-size", "8")


@pytest.fixture
def printed(capsys):
    """Returns a function that gives the document that a command prints."""

    def run(*arguments):
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def commands(parser, *above):
    """Yields the words of each command with its parser."""
    below = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    for action in below:
        for name, own in action.choices.items():
            yield from commands(own, *above, name)
    if not below:
        yield " ".join(above), parser


def test_every_command_that_lists_has_the_flag():
    found = dict(commands(build_parser()))
    assert {name for name, own in found.items() if "--json" in own.flags} == LISTINGS


def test_presets(printed):
    document = printed("presets")
    assert document["tiny"]["parameters"]["total"] == PARAMETERS["tiny"].total
    assert document["tiny"]["num_experts"] == 8


def test_a_schedule_is_an_inventory_that_gives_the_same_schedule(printed, tmp_path):
    document = printed("schedule", *DENSE, "--moevement-window", 2)
    assert document["window"] == 2
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(document))
    assert printed("schedule", "--inventory", file, "--moevement-window", 2) == document


def test_the_plan_of_a_recovery(printed):
    file = ROOT / "docs" / "examples" / "facts.json"
    document = printed("explain", file)
    assert document.keys() == {str(file)}
    assert document[str(file)]["verdict"] == "LOCALIZED"
    assert len(document[str(file)]["stages"]) > 1


def test_recoveries(printed, tmp_path):
    told(tmp_path, 0)
    told(tmp_path, 1)
    (recovery,) = printed("recoveries", tmp_path)["recoveries"]
    assert (recovery["verdict"], recovery["target"], recovery["scope"]) == ("LOCALIZED", 9, [1])
    assert recovery["duration_s"] == pytest.approx(3.75)
    assert recovery["time"].endswith("+00:00")
