# SPDX-License-Identifier: Apache-2.0
"""The lines are Megatron-LM's, character for character."""

import dataclasses
import math
from datetime import datetime, timedelta

from megatron_moevement.training.reporting.interval import Totals
from megatron_moevement.training.reporting.iteration_line import (
    IterationReport,
    evaluation_lines,
    iteration_line,
    perplexity,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, 678)
REPORT = IterationReport(
    iteration=10,
    train_iters=100,
    consumed_samples=640,
    elapsed_per_iteration=timedelta(milliseconds=1234.56),
    tflops_per_gpu=None,
    learning_rate=1.5e-4,
    global_batch_size=64,
    losses={"lm loss": 9.87654321, "load_balancing_loss": 1.0625},
    loss_scale=65536.0,
    grad_norm=1.23456,
    skipped_iterations=2,
    nan_iterations=1,
)


def test_the_line_has_the_fields_of_megatron_in_their_order():
    assert iteration_line(REPORT, NOW) == (
        " [2026-01-02 03:04:05.000678] iteration       10/     100 |"
        " consumed samples:          640 |"
        " elapsed time per iteration (ms): 1234.6 |"
        " learning rate: 1.500000E-04 |"
        " global batch size:    64 |"
        " lm loss: 9.876543E+00 |"
        " load_balancing_loss: 1.062500E+00 |"
        " loss scale: 65536.0 |"
        " grad norm: 1.235 |"
        " number of skipped iterations:   2 |"
        " number of nan iterations:   1 |"
    )


def test_throughput_follows_the_time_when_asked_for():
    line = iteration_line(dataclasses.replace(REPORT, tflops_per_gpu=123.45), NOW)
    assert "(ms): 1234.6 | throughput per GPU (TFLOP/s/GPU): 123.5 | learning rate" in line


def test_totals_follow_the_gradient_norm_when_asked_for():
    line = iteration_line(
        dataclasses.replace(REPORT, totals=Totals(num_zeros=17, params_norm=2.5)), NOW
    )
    assert "grad norm: 1.235 | num zeros: 17.0 | params norm: 2.500 | number of skipped" in line


def test_what_does_not_exist_is_left_out():
    report = dataclasses.replace(
        REPORT, grad_norm=None, learning_rate=None, losses={"lm loss": math.nan, "z_loss": 0.0}
    )
    line = iteration_line(report, NOW)
    for absent in ("grad norm", "learning rate", "lm loss", "z_loss"):
        assert absent not in line


def test_an_evaluation_is_ruled_and_has_a_perplexity():
    rule, text, last = evaluation_lines(20, {"lm loss": 2.0}, None).split("\n")
    assert text == (
        " validation loss at iteration 20 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 | "
    )
    assert rule == last == "-" * (len(text) + 1)


def test_an_evaluation_after_the_training_names_its_split():
    assert " validation loss at iteration 20 on test set | " in evaluation_lines(
        20, {"lm loss": 2.0}, "test"
    )


def test_a_perplexity_never_overflows():
    assert perplexity(1e6) == math.exp(20)
