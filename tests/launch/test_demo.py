# SPDX-License-Identifier: Apache-2.0
"""The demo ends well when it learns, one stage replays and no bit differs, and fails otherwise."""

import os
import re
import subprocess
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo.sh"
ITERATIONS = 80

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns a folder for results; the text is prepared once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def demo(runs, shared_memory):
    """Returns what runs the demo, with a store of the test's own."""

    def run(*flags):
        return run_demo(runs, f"--moevement-store-dir={shared_memory}", *flags)

    return run


def run_demo(runs, *flags):
    """Runs the demo; returns what it came to and its newest folder."""
    environment = {**os.environ, "RUNS": str(runs), "ITERATIONS": str(ITERATIONS)}
    result = subprocess.run(
        [DEMO, *flags], env=environment, capture_output=True, text=True, check=False
    )
    return result, max((runs / "demo").glob("2*"))


def test_a_killed_rank_costs_no_bit(demo):
    result, folder = demo()
    assert result.returncode == 0, result.stdout + result.stderr
    verdict = r"^validation loss \d\.\d{4} is low enough: 0\.3 nats below the unigram entropy"
    assert re.search(verdict, result.stdout, re.MULTILINE)
    assert "generation 1: LOCALIZED, stage 1 replayed" in result.stdout
    assert "guarantee EXACT" in result.stdout
    assert "same bits:" in result.stdout
    for name in ("train.log", "losses.png", "events", "digest.json"):
        assert (folder / name).exists()
        assert (folder / "killed" / name).exists()
    assert (folder / "killed" / "report.html").exists()
    listed = result.stdout.rpartition("same bits:")[2]
    for name in ("train.log", "losses.png", "checkpoints/", str(folder)):
        assert name in listed
    newest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(newest.read_text()) == ITERATIONS


def test_it_fails_when_the_model_does_not_learn(demo):
    result, folder = demo("--lr", "1e-9")
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"^validation loss \d\.\d{4} is too high:", result.stdout, re.MULTILINE)
    assert not (folder / "killed" / "events").exists()


def test_it_fails_when_a_stage_replays_that_lost_nothing(demo):
    result, _ = demo("--moevement-no-upstream-log")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "generation 1: GLOBAL, stages 0, 1 replayed" in result.stdout
    assert "same bits:" not in result.stdout


def test_it_fails_when_a_bit_differs(demo):
    # The killed job begins with a checkpoint, and its random streams as at the very start.
    result, _ = demo("--no-load-rng", "--hidden-dropout", "0.1")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "generation 1: LOCALIZED" in result.stdout
    assert "the two digests differ" in result.stderr
