# SPDX-License-Identifier: Apache-2.0
"""The reporting flags: Megatron-LM's names, ranges, and what must be installed for them."""

import importlib.util

import pytest

from megatron_moevement.errors import UserError


def test_flags_have_megatron_defaults(logging_config):
    config = logging_config()
    assert (config.log_interval, config.tensorboard_log_interval) == (100, 1)
    assert config.log_loss_scale_to_tensorboard
    assert config.tensorboard_dir is None
    assert config.moevement_event_dir is None


def test_flags_reach_the_config(logging_config):
    config = logging_config(
        "--log-interval", "7", "--log-throughput", "--no-log-loss-scale-to-tensorboard"
    )
    assert (config.log_interval, config.log_throughput) == (7, True)
    assert not config.log_loss_scale_to_tensorboard


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--log-interval", "0"], "--log-interval 0 must be at least 1"),
        (["--tensorboard-log-interval", "-1"], "--tensorboard-log-interval -1 must be at least 1"),
        (["--moevement-event-interval", "0"], "--moevement-event-interval 0 must be at least 1"),
        (["--timing-log-level", "3"], "--timing-log-level 3 must be 0, 1 or 2"),
        (["--wandb-project", "moe"], "--wandb-project needs --wandb-exp-name"),
    ],
)
def test_values_out_of_range_are_refused(logging_config, argv, message):
    with pytest.raises(UserError, match=message):
        logging_config(*argv)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_weights_and_biases_must_be_installed_when_asked_for(logging_config):
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb"):
        logging_config("--wandb-project", "moe", "--wandb-exp-name", "first")


@pytest.mark.parametrize(
    ("argv", "ranks", "interval"), [([], 64, 1), ([], 65, 10), (["1"], 65, 1), (["7"], 2, 7)]
)
def test_the_number_of_ranks_decides_the_interval_of_events_unless_it_is_given(
    logging_config, argv, ranks, interval
):
    flags = (f"--moevement-event-interval={value}" for value in argv)
    assert logging_config(*flags).recording(ranks).interval == interval
