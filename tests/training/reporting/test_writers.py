# SPDX-License-Identifier: Apache-2.0
"""Scalars arrive in TensorBoard, over iterations and over samples, across restarts."""

import importlib.util

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_moevement.errors import UserError
from megatron_moevement.training.reporting import recovery_scalars
from megatron_moevement.training.reporting.wandb_run import WandbRun
from megatron_moevement.training.reporting.writers import ScalarWriters, open_writers
from tests.harness.wandb_file import wandb_configuration, wandb_history


def _points(directory, name):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(name)]


def test_scalars_are_found_in_tensorboard(logging_config, tmp_path):
    writers = open_writers(logging_config("--tensorboard-dir", str(tmp_path)), None)
    writers.add({"lm loss": 2.5, "grad-norm": 1.5}, 3, 24)
    writers.add({"iteration-time": 0.25}, 3)
    writers.close()
    assert _points(tmp_path, "lm loss") == [(3, 2.5)]
    assert _points(tmp_path, "lm loss vs samples") == [(24, 2.5)]
    assert _points(tmp_path, "grad-norm") == [(3, 1.5)]
    assert _points(tmp_path, "iteration-time") == [(3, 0.25)]


def test_a_second_process_continues_the_curves_in_a_file_of_its_own(logging_config, tmp_path):
    config = logging_config("--tensorboard-dir", str(tmp_path))
    for first in (1, 3):
        writers = open_writers(config, None)
        for k in (first, first + 1):
            writers.add({"lm loss": float(k)}, k)
        writers.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert _points(tmp_path, "lm loss") == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_what_is_flushed_can_be_read_while_training_goes_on(logging_config, tmp_path):
    writers = open_writers(logging_config("--tensorboard-dir", str(tmp_path)), None)
    for k in (1, 2, 3):
        writers.add({"lm loss": float(k)}, k)
        writers.flush()
    assert _points(tmp_path, "lm loss") == [(1, 1), (2, 2), (3, 3)]
    writers.close()


def test_a_folder_that_can_not_be_written_is_the_users_error(logging_config, tmp_path):
    (tmp_path / "file").touch()
    config = logging_config("--tensorboard-dir", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"--tensorboard-dir .*give a writable folder"):
        open_writers(config, None)


def test_without_writers_nothing_happens(logging_config):
    writers = open_writers(logging_config(), None)
    assert not writers
    writers.add({"lm loss": 1.0}, 1, 8)
    writers.flush()
    writers.close()


def test_all_writers_are_closed_when_one_fails():
    closed = []

    class Failing:
        def close(self):
            closed.append("failing")
            raise OSError("disk full")

    class Working:
        def close(self):
            closed.append("working")

    with pytest.raises(OSError, match="disk full"):
        ScalarWriters([Failing(), Working()]).close()
    assert closed == ["failing", "working"]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
class TestWeightsAndBiases:
    """With the package itself, which keeps in a folder what it would send."""

    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "offline")

    @pytest.fixture
    def report(self, logging_config, tmp_path):
        """Reports scalars as a process of a run does; returns what was recorded, by step."""
        flags = ("--wandb-project", "moe", "--wandb-exp-name", "first")
        config = logging_config(*flags, "--wandb-save-dir", str(tmp_path))

        def write(*points):
            before = set(tmp_path.glob("wandb/offline-run-*/*.wandb"))
            writers = open_writers(config, None, WandbRun("abc", {"lr": 0.25}))
            for scalars, step in points:
                writers.add(scalars, step, 8 * step)
            writers.close()
            (written,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - before
            return written

        return write

    def test_a_later_process_goes_on_with_the_run(self, report):
        first = report(({"lm loss": 1.0}, 1), ({"lm loss": 0.5}, 2))
        second = report(({"lm loss": 0.25}, 3))
        assert first != second
        assert first.name == second.name  # run-ID.wandb
        assert wandb_history(first) == {1: {"lm loss": 1.0}, 2: {"lm loss": 0.5}}
        assert wandb_history(second)[3] == {"lm loss": 0.25}
        for path in (first, second):
            assert wandb_configuration(path)["lr"] == 0.25

    def test_steps_that_are_repeated_are_left_out_and_their_recovery_is_not(self, report, capfd):
        time = f"{recovery_scalars.PREFIX}-time"
        written = report(
            ({"lm loss": 1.0}, 1),
            ({"lm loss": 0.5}, 2),
            ({time: 9.0}, 0),
            ({"lm loss": 7.0}, 1),
            ({"lm loss": 0.25}, 3),
        )
        assert "monotonically" not in capfd.readouterr().err  # a warning for each of them
        found = wandb_history(written)
        assert found == {1: {"lm loss": 1.0}, 2: {"lm loss": 0.5, time: 9.0}, 3: {"lm loss": 0.25}}
