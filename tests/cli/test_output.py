# SPDX-License-Identifier: Apache-2.0
"""What commands print: one document for programs, with `--json`."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.cli import build_parser, main
from megatron_moevement.cli.convert import document
from megatron_moevement.cli.output import show
from megatron_moevement.training.checkpoints import CheckpointFolder, record_file
from megatron_moevement.training.presets import PARAMETERS
from tests.cli.test_recoveries import told

ROOT = Path(__file__).resolve().parents[2]
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


def test_every_command_has_the_flag():
    found = dict(commands(build_parser()))
    assert {"data prepare", "launch", "stores"} <= found.keys()
    assert [name for name, own in found.items() if "--json" not in own.flags] == []


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


PRINTING = """
import argparse, subprocess, sys
from megatron_moevement.cli.output import document_alone, show
rank = [sys.executable, "-c", "print('of a rank')"]
args = argparse.Namespace(json=sys.argv[1] == "json")
print("before")
try:
    with document_alone(args):
        print("of this process")
        subprocess.run(rank, check=True)
        raise ValueError
except ValueError:
    subprocess.run(rank, check=True)
    show(args, {"made": 1}, [])
"""


@pytest.mark.parametrize("shape", ["json", "text"])
def test_what_is_printed_before_a_document_goes_to_standard_error(shape):
    command = [sys.executable, "-c", PRINTING, shape]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=buffered)
    meanwhile = ["of this process", "of a rank"]
    if shape == "json":
        assert ended.stdout == 'before\nof a rank\n{\n "made": 1\n}\n'
        assert sorted(ended.stderr.splitlines()) == sorted(meanwhile)
    else:
        assert sorted(ended.stdout.splitlines()) == sorted(["before", *meanwhile, "of a rank"])
        assert ended.stderr == ""


def test_the_document_of_a_conversion_names_the_checkpoint_that_it_saved(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step, content in ((8, "older training, newer step"), (6, "what was converted")):
        writing = folder.begin(step)
        (writing / "a").write_text(content)
        (writing / "b").write_text("b")
        folder.commit(step, {name: record_file(writing / name) for name in ("a", "b")})
    assert document(folder) == {
        "checkpoint": f"{tmp_path}/iter_0000006",
        "step": 6,
        "files": 2,
        "bytes": len("what was convertedb"),
    }


def test_a_reader_that_has_left_ends_the_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megatron_moevement.cli", "presets", "--json"]
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_people_see_a_path_as_it_is(capsys):
    show(argparse.Namespace(json=False), None, ["runs/:fire:/[red]"])
    assert capsys.readouterr().out == "runs/:fire:/[red]\n"
