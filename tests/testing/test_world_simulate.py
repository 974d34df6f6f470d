# SPDX-License-Identifier: Apache-2.0
"""The command line of the simulator: what it prints and returns, and that it repeats itself."""

import json
import os
import re
import subprocess
import sys

import pytest

from megatron_moevement.errors import ExitCode
from megatron_moevement.testing import simulate
from megatron_moevement.testing.campaign import Failure, play
from megatron_moevement.testing.mutations import MUTATIONS, mutation_named
from megatron_moevement.testing.regression import Regression
from tests.harness import mutation_check


def simulated(*args, hash_seed="0"):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_moevement.testing.simulate", *map(str, args)],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_without_a_violation_the_exit_code_is_0_and_the_last_line_is_the_histogram(capsys):
    assert simulate.main(["--seeds", "40"]) == ExitCode.DONE == 0
    (line,) = capsys.readouterr().out.splitlines()
    histogram = json.loads(line)
    assert histogram["seeds"] == 40
    assert histogram["violations"] == 0
    assert set(histogram["verdicts"]) >= {"LOCALIZED", "GLOBAL"}
    assert all(0 < seeds <= 40 for seeds in histogram["verdicts"].values())
    assert all(0 < seeds <= 40 for seeds in histogram["scopes"].values())
    assert [int(steps) for steps in histogram["replayed_steps"]] == sorted(
        int(steps) for steps in histogram["replayed_steps"]
    )
    assert histogram["ticks"] > 40


def test_a_violation_is_told_as_a_story_and_as_a_world_to_keep(capsys):
    args = ["--seeds", "3", "--first", "2", "--mutate", "target-is-minimum"]
    assert simulate.main(args) == ExitCode.FAILURE == 1
    *told, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["violations"] >= 1
    assert told[0].startswith("seed 2: 4 target: ")
    shrunk = next(place for place, line in enumerate(told) if line.startswith("shrunk: "))
    for story in (told[1:shrunk], told[shrunk + 1 :]):
        assert any("FAULT" in line for line in story)
        assert any("VIOLATED 4 target: " in line for line in story)
    kept = Regression.from_json("\n".join(told[told.index("{") :]))
    assert (kept.mutation, kept.violates) == ("target-is-minimum", "4 target")
    failure = play(kept.scenario, mutation_named(kept.mutation).policies)
    assert isinstance(failure, Failure)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--seeds", "0"], "--seeds 0"),
        (["--seeds", "3", "--first", "-1"], "--first -1"),
        (["--jobs", "0"], "--jobs 0"),
        (["--seeds", "many"], "invalid int value"),
        (["--mutate", "everything"], "invalid choice: 'everything'"),
        (["--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_bad_arguments_end_with_2(args, said, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main(args)
    assert ended.value.code == ExitCode.BAD_ARGUMENTS == 2
    assert said in capsys.readouterr().err


def test_the_help_names_every_mutation(capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main(["--help"])
    assert ended.value.code == 0
    out = "".join(capsys.readouterr().out.split())
    assert all(mutation.name in out for mutation in MUTATIONS)


def test_another_hash_seed_and_several_workers_tell_the_same_story():
    args = ("--seeds", 12, "--first", 0, "--mutate", "target-is-minimum")
    first = simulated(*args, "--jobs", 1, hash_seed="1")
    second = simulated(*args, "--jobs", 3, hash_seed="4242")
    assert first.returncode == second.returncode == 1
    assert first.stderr == second.stderr == ""
    assert "VIOLATED 7 progress: " in first.stdout
    assert first.stdout == second.stdout


def test_the_mutation_check_says_which_seed_found_what(capsys, monkeypatch):
    few = [mutation_named(name) for name in ("target-is-minimum", "torn-commit-trusted")]
    monkeypatch.setattr(mutation_check, "MUTATIONS", few)
    assert mutation_check.main([]) == ExitCode.DONE
    found = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"target-is-minimum +seed +\d+  .+", found[0])
    assert re.fullmatch(r"torn-commit-trusted +seed +\d+  .+", found[1])
    assert found[2:] == ["2 of 2 mutations found"]
    assert mutation_check.main(["--seeds", "1"]) == ExitCode.FAILURE
    assert "NOT FOUND in 1 seeds" in capsys.readouterr().out
