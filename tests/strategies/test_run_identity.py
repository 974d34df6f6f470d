# SPDX-License-Identifier: Apache-2.0
"""Which memory a launch goes on from: that of its own run, whatever else is there."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.protected_run import ALWAYS_TRAINED, PROGRAM
from tests.harness.random_text import data_flags, prepare_random_text

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

NAMING = Path(__file__).with_name("naming_pretrain.py")
KILLED_IN, LAST = 8, 10
MODEL = """--num-layers=1 --hidden-size=16 --num-attention-heads=2 --num-experts=2
    --disable-bias-linear --seq-length=16 --micro-batch-size=1 --global-batch-size=2 --lr=1e-2
    --eval-iters=0 --lr-decay-style=constant --log-interval=1"""
PROTECTION = "--moevement-strategy=moevement --moevement-window=2 --moevement-replicas=0"
FLAGS = (*MODEL.split(), *PROTECTION.split(), *ALWAYS_TRAINED)


@pytest.fixture
def launch(megatron_fork_server, tmp_path):
    """Returns a function that launches training; what it leaves lies in one store directory."""

    def start(*flags, steps=LAST, program=PROGRAM):
        argv = [*FLAGS, f"--train-iters={steps}", f"--moevement-store-dir={tmp_path / 'store'}"]
        argv += [f"--moevement-event-dir={tmp_path / 'events'}", *flags]
        with megatron_fork_server.start_program(
            program, argv, world_size=1, timeout_s=100, env={}
        ) as job:
            (result,) = job.wait().ranks
        return result

    return start


@pytest.fixture
def killed(launch, tmp_path):
    """Returns a function that launches training and kills it; returns its data flags."""

    def start(*flags, data=None):
        data = data or data_flags(text(tmp_path / "data"))
        result = launch(*data, *flags, "--moevement-faults", f"{KILLED_IN}:barrier")
        assert result.exit_code == -signal.SIGKILL
        return data

    return start


def text(folder, upper=False):
    folder.mkdir()
    prefix = prepare_random_text(folder)
    if upper:
        tokens = prefix.with_suffix(".bin")
        tokens.write_bytes(tokens.read_bytes().upper())
    return prefix


def resumed_at(tmp_path):
    """Returns the step that each recovery led to."""
    return [
        event.iteration
        for event in read_events(tmp_path / "events")
        if event.event is EventName.RECOVERED
    ]


def first_step(result):
    (line, *_) = (line for line in result.stdout.splitlines() if " iteration " in line)
    return int(line.split("iteration")[1].split("/")[0])


def test_two_experiments_with_data_of_one_name_share_no_memory(
    launch, killed, tmp_path, monkeypatch
):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text(tmp_path / name / "data", upper=name == "b")
    data = ("--data-path=data/text", "--tokenizer-type=ByteTokenizer", "--split=90,5,5")
    monkeypatch.chdir(tmp_path / "a")
    killed(data=data)
    monkeypatch.chdir(tmp_path / "b")
    result = launch(*data)
    assert (result.exit_code, first_step(result)) == (0, 1)
    assert resumed_at(tmp_path) == []
    (line,) = (one for one in result.stderr.splitlines() if "leaves alone run" in one)
    assert "training data" in line
    assert f"step {KILLED_IN - 1} is in the memory" in line
    assert "moevement clean --run-id" in line
    monkeypatch.chdir(tmp_path / "a")
    assert launch(*data).exit_code == 0
    assert resumed_at(tmp_path) == [KILLED_IN - 1]


def test_data_that_are_rewritten_in_place_are_other_data(launch, killed, tmp_path):
    data = killed()
    tokens = tmp_path / "data" / "text.bin"
    size_bytes = tokens.stat().st_size
    tokens.write_bytes(tokens.read_bytes().upper())
    assert tokens.stat().st_size == size_bytes
    result = launch(*data)
    assert (result.exit_code, first_step(result)) == (0, 1)
    assert resumed_at(tmp_path) == []
    (line,) = (one for one in result.stderr.splitlines() if "leaves alone run" in one)
    assert "training data" in line


def test_the_same_data_under_another_path_go_on(launch, killed, tmp_path):
    killed()
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    assert launch(*data_flags(tmp_path / "elsewhere" / "text")).exit_code == 0
    assert resumed_at(tmp_path) == [KILLED_IN - 1]


def test_a_launch_with_other_flags_that_decide_no_bit_goes_on(launch, killed, tmp_path):
    data = killed("--moevement-state-digest", str(tmp_path / "none.json"))
    flags = ["--distributed-timeout-minutes=1", "--eval-interval=7", "--num-workers=0"]
    flags += ["--override-opt-param-scheduler", "--global-batch-size=2"]
    digest = tmp_path / "digest.json"
    assert launch(*data, *flags, f"--moevement-state-digest={digest}").exit_code == 0
    assert resumed_at(tmp_path) == [KILLED_IN - 1]
    plain = tmp_path / "plain.json"
    assert (
        launch(*data, "--moevement-strategy=off", f"--moevement-state-digest={plain}").exit_code
        == 0
    )
    assert json.loads(digest.read_text()) == json.loads(plain.read_text())


def test_a_longer_run_of_the_same_samples_goes_on(launch, killed, tmp_path):
    data = killed()
    digests = [tmp_path / "longer.json", tmp_path / "plain.json"]
    longer = launch(*data, f"--moevement-state-digest={digests[0]}", steps=2 * LAST)
    assert longer.exit_code == 0
    assert resumed_at(tmp_path) == [KILLED_IN - 1]
    launch(
        *data, "--moevement-strategy=off", f"--moevement-state-digest={digests[1]}", steps=2 * LAST
    )
    assert json.loads(digests[0].read_text()) == json.loads(digests[1].read_text())


def test_another_learning_rate_is_another_run(launch, killed, tmp_path):
    result = launch(*killed(), "--lr=2e-2")
    assert first_step(result) == 1
    (line,) = (one for one in result.stderr.splitlines() if "leaves alone run" in one)
    assert "it differs in --lr 0.01 (here: 0.02)" in line


def test_memory_of_another_window_is_refused_in_a_line(launch, killed, tmp_path):
    result = launch(*killed(), "--moevement-window=3")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()[-1:]
    window = "--moevement-window 2"
    assert f"made with {window}: launch with {window} and without limits of W to go on" in line


def test_what_a_run_began_with_is_part_of_it(launch, killed, tmp_path):
    data = data_flags(text(tmp_path / "data"))
    for name, seed in (("x", 1), ("y", 2)):
        save = f"--save={tmp_path / name}"
        assert launch(*data, save, f"--seed={seed}", "--exit-interval=2").exit_code == 0
    killed(f"--load={tmp_path / 'x'}", "--finetune", data=data)
    assert first_step(launch(*data, f"--load={tmp_path / 'y'}", "--finetune")) == 1
    assert resumed_at(tmp_path) == []
    again = launch(*data, f"--load={tmp_path / 'x'}", "--finetune")
    assert again.exit_code == 0
    assert resumed_at(tmp_path) == [KILLED_IN - 1]


def test_a_run_that_loads_what_it_saved_itself_is_the_same(launch, killed, tmp_path):
    save = f"--save={tmp_path / 'own'}"
    data = killed(save, "--save-interval=4")
    assert launch(*data, save, f"--load={tmp_path / 'own'}").exit_code == 0
    assert resumed_at(tmp_path) == [KILLED_IN - 1]


@pytest.mark.slow
def test_a_death_right_after_a_save_was_named_goes_back_to_no_other_step(launch, tmp_path):
    data = data_flags(text(tmp_path / "data"))
    saving = (*data, f"--save={tmp_path / 'own'}", f"--save-interval={KILLED_IN}")
    dead = launch(*saving, f"--dies-naming={KILLED_IN}", program=NAMING)
    assert dead.exit_code == -signal.SIGKILL
    assert (tmp_path / "own" / f"iter_{KILLED_IN:07d}").is_dir()
    digests = [tmp_path / "resumed.json", tmp_path / "plain.json"]
    result = launch(*saving, f"--moevement-state-digest={digests[0]}")
    assert (result.exit_code, first_step(result)) == (0, KILLED_IN + 1)
    launch(*data, "--moevement-strategy=off", f"--moevement-state-digest={digests[1]}")
    assert json.loads(digests[0].read_text()) == json.loads(digests[1].read_text())
