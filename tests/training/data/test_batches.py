# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a step depend on the consumed samples alone."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.errors import UserError
from megatron_moevement.training.data.batches import BatchLayout, MicroBatches, sample_indices
from megatron_moevement.training.data.splits import SampleCounts, build_splits

NUM_STEPS = 8
VOCAB_SIZE = 1001


@pytest.fixture
def open_dataset(write_documents, configure):
    """Opens a data set; the test holds it, so that its files are closed when the test ends."""
    config = configure("--data-path", write_documents("a"), "--split", "8,1,1")
    return lambda: build_splits(config, SampleCounts(NUM_STEPS * 12, 0, 0), seed=7).train


class NumberedSamples:
    """Sample i holds the number i; reading `broken` fails."""

    def __init__(self, size: int, broken: int | None = None) -> None:
        self.size = size
        self.broken = broken

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(f"sample {index} is unreadable")
        sample = torch.full((4,), index)
        return dict.fromkeys(("tokens", "labels", "position_ids", "loss_mask"), sample)


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)
        for mine, other in zip(ours, theirs, strict=True)
    )


@given(
    consumed=st.integers(0, 10**12),
    num_microbatches=st.integers(1, 8),
    dp_size=st.integers(1, 8),
    micro_batch_size=st.integers(1, 8),
)
def test_ranks_share_a_step_out_without_gap_or_overlap(
    consumed, num_microbatches, dp_size, micro_batch_size
):
    dealt = [
        index
        for micro_batch in range(num_microbatches)
        for rank in range(dp_size)
        for index in sample_indices(consumed, micro_batch, rank, dp_size, micro_batch_size)
    ]
    layout = BatchLayout(micro_batch_size, num_microbatches, dp_size)
    assert dealt == list(range(consumed, consumed + layout.global_batch_size))


def test_a_micro_batch_has_the_shapes_and_types_of_training(open_dataset):
    batch = MicroBatches(open_dataset(), BatchLayout(3, 2, 2), 1, VOCAB_SIZE).fetch(12, 1)
    assert {key: (tuple(t.shape), t.dtype) for key, t in batch.items()} == {
        "tokens": ((3, 16), torch.int64),
        "labels": ((3, 16), torch.int64),
        "position_ids": ((3, 16), torch.int64),
        "loss_mask": ((3, 16), torch.float32),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert batch["position_ids"].tolist() == [list(range(16))] * 3


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_step_fetched_alone_equals_that_of_a_run_from_the_start(open_dataset, num_workers):
    dataset = open_dataset()
    layout = BatchLayout(2, 3, 2)
    batches = MicroBatches(dataset, layout, 1, VOCAB_SIZE)
    with batches.steps(0, NUM_STEPS, num_workers) as steps:
        run = list(steps)
    assert len(run) == NUM_STEPS
    for step, micro_batches in enumerate(run):
        fresh = MicroBatches(dataset, layout, 1, VOCAB_SIZE)
        assert same(micro_batches, fresh.step(step * layout.global_batch_size))
    with batches.steps(5 * layout.global_batch_size, 2, num_workers) as resumed:
        assert all(same(*pair) for pair in zip(resumed, run[5:7], strict=True))


def test_steps_differ_from_each_other(open_dataset):
    batches = MicroBatches(open_dataset(), BatchLayout(2, 3, 2), 0, VOCAB_SIZE)
    tokens = [batches.step(12 * step)[0]["tokens"] for step in range(NUM_STEPS)]
    assert not any(torch.equal(a, b) for a, b in pairwise(tokens))


def test_all_data_parallel_sizes_see_the_same_global_order(open_dataset):
    dataset = open_dataset()

    def order(dp_size):
        layout = BatchLayout(2, 6 // dp_size, dp_size)
        ranks = [MicroBatches(dataset, layout, r, VOCAB_SIZE) for r in range(dp_size)]
        fetched = [
            rank.fetch(step * 12, micro_batch)["tokens"]
            for step in range(NUM_STEPS)
            for micro_batch in range(layout.num_microbatches)
            for rank in ranks
        ]
        return torch.cat(fetched)

    assert torch.equal(order(1), order(2))
    assert torch.equal(order(1), order(3))
    expected = torch.stack([dataset[index]["tokens"] for index in range(NUM_STEPS * 12)])
    assert torch.equal(order(1), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_fails_in_a_worker_is_raised_at_its_step(num_workers):
    batches = MicroBatches(NumberedSamples(100, broken=13), BatchLayout(2, 3, 1), 0, 1000)
    with batches.steps(0, 10, num_workers) as steps:
        assert same(next(steps), batches.step(0))
        assert same(next(steps), batches.step(6))
        with pytest.raises(OSError, match="sample 13 is unreadable"):
            next(steps)
        with pytest.raises(StopIteration):
            next(steps)


def test_closing_ends_the_threads():
    before = threading.active_count()
    steps = MicroBatches(NumberedSamples(100), BatchLayout(1, 2, 1), 0, 1000).steps(0, 50, 3)
    next(steps)
    assert threading.active_count() > before
    steps.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(steps)


def test_threads_end_with_the_last_step():
    before = threading.active_count()
    steps = MicroBatches(NumberedSamples(6), BatchLayout(1, 2, 1), 0, 1000).steps(0, 3, 2)
    assert [batch[0]["tokens"][0, 0].item() for batch in steps] == [0, 2, 4]
    assert threading.active_count() == before


def test_workers_fetch_no_more_than_their_share_ahead():
    class Counted(NumberedSamples):
        highest = 0

        def __getitem__(self, index):
            self.highest = max(self.highest, index)
            return super().__getitem__(index)

    dataset = Counted(1000)
    with MicroBatches(dataset, BatchLayout(1, 4, 1), 0, 10**6).steps(0, 250, 2) as steps:
        for _ in range(3):
            next(steps)
    assert 12 <= dataset.highest + 1 <= 12 + 4


def test_the_end_of_the_data_is_said():
    batches = MicroBatches(NumberedSamples(10), BatchLayout(2, 2, 1), 0, 1000)
    batches.step(4)
    with pytest.raises(UserError, match="ends at sample 10, the step that starts at 8"):
        batches.step(8)


def test_an_id_outside_the_vocabulary_is_refused():
    batches = MicroBatches(NumberedSamples(100), BatchLayout(2, 1, 1), 0, vocab_size=50)
    batches.fetch(48, 0)
    with pytest.raises(UserError, match="hold the id 51, the vocabulary ends at 49"):
        batches.fetch(50, 0)
