# SPDX-License-Identifier: Apache-2.0
"""A run and its steps, to be reported."""

import argparse
import dataclasses
from datetime import timedelta

import pytest
import torch

from megatron_moevement.runtime.coordination.ledger import LedgerEntry, ParameterGroup
from megatron_moevement.settings.flags import add_flags
from megatron_moevement.training.reporting.arguments import LoggingConfig
from megatron_moevement.training.reporting.reporter import ReportedRun


@dataclasses.dataclass(frozen=True)
class Reached:
    """As much of the loop's progress as reports look at."""

    consumed_samples: int


@pytest.fixture
def logging_config():
    """Parses reporting flags."""

    def parse(*argv: str) -> LoggingConfig:
        parser = argparse.ArgumentParser()
        add_flags(parser, "logging", LoggingConfig)
        return LoggingConfig.from_args(parser.parse_args(argv))

    return parse


@pytest.fixture
def reported_run():
    """Makes a run of 2 ranks, 6 iterations and 8 samples of 16 tokens an iteration."""

    def make(**changes) -> ReportedRun:
        run = ReportedRun(
            rank=1,
            world_size=2,
            generation=0,
            train_iters=6,
            global_batch_size=8,
            seq_length=16,
            flops_per_iteration=10**12,
            device=torch.device("cpu"),
            save=None,
        )
        return dataclasses.replace(run, **changes)

    return make


@pytest.fixture
def step_arguments():
    """Makes what the loop gives a reporter for step k; `changes` go to the ledger's entry."""

    def make(k: int, loss: float = 2.0, **changes):
        entry = LedgerEntry(
            step=k,
            loss=loss,
            consumed_samples=8 * (k - 1),
            loss_scale=1.0,
            found_inf=(False, False),
            grad_norm=0.5,
            clip_factor=1.0,
            num_tokens=128,
            groups=(ParameterGroup(lr=0.001 * k, weight_decay=0.1),),
            scalers=(None, None),
            random_state=None,
        )
        entry = dataclasses.replace(entry, **changes)
        return entry, Reached(8 * k), timedelta(milliseconds=100 * k)

    return make
