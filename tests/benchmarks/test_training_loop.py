# SPDX-License-Identifier: Apache-2.0
"""Our loop has the losses of Megatron-Core used directly, and the benchmark judges both sides."""

import contextlib
import io

import pytest

from tests.harness.benchmarks import benchmark

ITERATIONS = 5

pytestmark = pytest.mark.distributed


def compared():
    """Returns the losses of both sides."""
    found = benchmark("training_loop").compare(1, ITERATIONS)
    return [found.ours, found.theirs]


def judged(limit):
    """Returns the exit code of the command, and the lines that it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = benchmark("training_loop").main(["--blocks=1", "--iterations=1", f"--limit={limit}"])
    return [code, printed.getvalue().splitlines()]


def complaints(*cases):
    """Returns what the benchmark says of losses, and of a ratio under a limit of 1.03."""
    return [
        benchmark("training_loop")
        .Comparison(ours, [3.0, 2.0, 1.0], ratio, 1.0, [ratio])
        .complaints(1.03)
        for ours, ratio in cases
    ]


def in_a_rank(server, target, *args):
    (value,) = server.run(target, world_size=1, args=[*args]).check().values
    return value


def test_our_loop_has_the_losses_of_megatron_core_used_directly(megatron_fork_server):
    ours, theirs = in_a_rank(megatron_fork_server, compared)
    assert ours == theirs
    assert len(set(ours)) == ITERATIONS


def test_a_ratio_over_the_limit_is_exit_code_1(megatron_fork_server):
    code, (losses, _, verdict) = in_a_rank(megatron_fork_server, judged, 0)
    assert code == 1
    assert losses == "losses equal, bit for bit: 1 of 1 iterations"
    assert verdict.startswith("fails: the ratio of medians is ")


def test_a_loss_that_differs_and_a_slow_loop_are_complaints(megatron_fork_server):
    same, other = [3.0, 2.0, 1.0], [3.0, 2.5, 0.5]
    found = in_a_rank(megatron_fork_server, complaints, (same, 1.03), (other, 1.0), (same, 1.04))
    assert found == [
        [],
        ["the losses of 2 iterations differ, iteration 2 first"],
        ["the ratio of medians is 1.0400, over the limit of 1.03"],
    ]
