# SPDX-License-Identifier: Apache-2.0
"""The chosen order leaves out in a run what it says, and is never worse than that by index."""

import pytest

from tests.harness.benchmarks import benchmark

pytestmark = pytest.mark.distributed

SMALL = (
    "--num-layers=2",
    "--hidden-size=32",
    "--num-experts=8",
    "--moe-ffn-hidden-size=32",
    "--vocab-size=96",
    "--seq-length=32",
)


def rows(skewness):
    """Returns the rows of the benchmark for a small model."""
    popularity = benchmark("popularity")
    found = popularity.rows_of((*popularity.FLAGS, *SMALL), 3, skewness, seed=1, ranks=2)
    return [[row.experts, row.order, row.flops, row.skipped, row.predicted] for row in found]


@pytest.mark.parametrize("skewness", [0.25, 0.75])
def test_the_chosen_order_leaves_out_most_and_what_was_predicted(megatron_fork_server, skewness):
    (found,) = megatron_fork_server.run(rows, world_size=1, args=[skewness]).check().values
    by_index = {experts: flops for experts, order, flops, _, _ in found if order == "index"}
    chosen = {experts: flops for experts, order, flops, _, _ in found if order == "chosen"}
    assert len(by_index) == len(chosen) == 3
    assert all(chosen[experts] <= flops for experts, flops in by_index.items())
    assert chosen["sequential"] < by_index["sequential"]
    assert chosen["sequential"] == chosen["grouped, host"]
    assert all(abs(skipped - predicted) < 1e-12 for *_, skipped, predicted in found)
