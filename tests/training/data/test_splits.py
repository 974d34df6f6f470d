# SPDX-License-Identifier: Apache-2.0
"""From the data flags to data sets."""

import pytest
import torch

from megatron_moevement.training.data.splits import SampleCounts, build_splits, count_samples


def tokens_of(dataset, count):
    return torch.stack([dataset[index]["tokens"] for index in range(count)])


def test_samples_are_counted_as_megatron_counts_them():
    counts = count_samples(train_iters=100, eval_interval=30, eval_iters=5, global_batch_size=8)
    assert counts == SampleCounts(train=800, valid=(3 + 1) * 5 * 8, test=40)


def test_without_evaluation_no_other_split_is_drawn_from():
    counts = count_samples(train_iters=10, eval_interval=30, eval_iters=0, global_batch_size=8)
    assert counts == SampleCounts(train=80, valid=0, test=0)


@pytest.mark.parametrize("cache", [None, "cache"])
def test_flags_reach_the_data_sets(write_documents, configure, tmp_path, cache):
    a, b = write_documents("a"), write_documents("b", first=500)
    words = ["--data-path", "1", a, "3", b, "--split", "8,2"]
    if cache:
        words += ["--data-cache-path", str(tmp_path / cache)]
    built = build_splits(configure(*words), SampleCounts(40, 8, 0), seed=3)
    assert (tokens_of(built.train, 40)[:, 0] >= 500).sum() == 30
    assert tokens_of(built.valid, 8).shape == (8, 16)
    assert built.test is None
    caches = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert caches == ([cache] if cache else ["a.cache", "b.cache"])


def test_each_split_has_the_data_its_flag_names(write_documents, configure):
    a, b = write_documents("a"), write_documents("b", first=500)
    config = configure("--train-data-path", a, "--valid-data-path", b, "--test-data-path", a)
    built = build_splits(config, SampleCounts(10, 10, 10), seed=3)
    assert tokens_of(built.train, 10).max() < 500 <= tokens_of(built.valid, 10).min()
    assert tokens_of(built.test, 10).max() < 500


def test_mock_data_needs_no_files(configure):
    built = build_splits(configure("--mock-data"), SampleCounts(10, 4, 2), seed=3)
    assert tokens_of(built.train, 10).shape == (10, 16)
    again = build_splits(configure("--mock-data"), SampleCounts(10, 4, 2), seed=3)
    assert torch.equal(tokens_of(built.valid, 4), tokens_of(again.valid, 4))
