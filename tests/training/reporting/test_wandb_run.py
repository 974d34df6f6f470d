# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases has one run for a job, whatever generation or launch of it reports."""

import json

import pytest

from megatron_moevement.training.arguments import parse
from megatron_moevement.training.reporting.wandb_run import WandbRun, init_arguments, settings_of

RUN = WandbRun("0123456789abcdef", {"lr": 0.1})
FLAGS = ("--wandb-project", "moe", "--wandb-exp-name", "first")


@pytest.fixture
def init(logging_config):
    """Returns what Weights & Biases is called with, by flags."""

    def call(*flags, run=RUN, environment=None):
        config = logging_config(*FLAGS, *flags)
        return init_arguments(config, run, "folder", environment or {})

    return call


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """What is checked here needs no package."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_each_generation_and_launch_of_a_run_goes_on_with_the_same(init):
    first = init()
    assert first["resume"] == "allow"
    assert init() == first
    assert init(run=WandbRun("another"))["id"] != first["id"]


def test_an_id_is_one_that_weights_and_biases_takes(init):
    run_id = "a" * 100
    own = init(run=WandbRun(run_id))["id"]
    assert 0 < len(own) <= 64
    assert own.isalnum()


@pytest.mark.parametrize(
    "flags",
    [("--wandb-exp-name", "second"), ("--wandb-project", "other"), ("--wandb-entity", "team")],
)
def test_another_name_or_place_is_another_run(init, flags):
    assert init(*flags)["id"] != init()["id"]


def test_a_run_that_no_launch_goes_on_from_is_one_by_itself(init):
    assert {"id", "resume"}.isdisjoint(init(run=WandbRun(None)))


def test_what_a_user_chooses_by_variables_counts(init):
    assert "id" not in init(environment={"WANDB_RUN_ID": "mine"})
    assert init(environment={"WANDB_RUN_ID": "mine"})["resume"] == "allow"
    assert "resume" not in init(environment={"WANDB_RESUME": "must"})


def test_name_place_and_settings_are_given(init):
    given = init("--wandb-entity", "team")
    assert {name: given[name] for name in ("dir", "name", "project", "entity", "config")} == {
        "dir": "folder",
        "name": "first",
        "project": "moe",
        "entity": "team",
        "config": {"lr": 0.1},
    }
    assert init()["entity"] is None


def test_the_settings_are_those_of_all_flags_and_json_holds_them():
    flags = ["--model-preset=tiny", "--mock-data", "--tokenizer-type=ByteTokenizer", "--bf16"]
    sizes = ["--micro-batch-size=1", "--global-batch-size=4", "--train-iters=7", "--lr=0.25"]
    ours = ["--moevement-strategy=moevement", "--moevement-faults=3:forward"]
    settings = settings_of(parse([*flags, *sizes, *ours], 2))
    assert json.loads(json.dumps(settings)) == settings
    expected = {
        "lr": 0.25,
        "bf16": True,
        "train_iters": 7,
        "num_experts": 8,
        "moevement_strategy": "moevement",
        "world_size": 2,
        "wandb_project": "",
        "seq_length": settings["seq_length"],
    }
    assert {name: settings[name] for name in expected} == expected
