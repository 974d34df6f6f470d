# SPDX-License-Identifier: Apache-2.0
"""Schedules are as long as the run says, in iterations or in samples."""

from megatron_moevement.settings.optimization import Lengths, Optimization
from megatron_moevement.settings.run import Run, in_iterations


def test_lengths_are_in_what_the_run_is_given_in():
    by_iterations = Optimization(lr=1.0, lr_decay_iters=7, lr_warmup_iters=2, lr_wsd_decay_iters=3)
    assert by_iterations.lengths(Run(train_iters=9)) == Lengths(9, 7, 2, 3)
    samples = Run(micro_batch_size=2, global_batch_size=8, train_samples=90)
    run = in_iterations(samples, data_parallel_size=2)
    assert run.train_iters == 11
    by_samples = Optimization(lr=1.0, lr_decay_samples=70, lr_warmup_fraction=0.5)
    assert by_samples.lengths(run) == Lengths(90, 70, 35, None)
