# SPDX-License-Identifier: Apache-2.0
"""Data sets equal those that Megatron-Core builds, and any rank can build them alone."""

import hashlib
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.core.datasets.indexed_dataset import _IndexReader

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.datasets import (
    DatasetRequest,
    IndexRole,
    SampleCounts,
    build_datasets,
)
from megatron_moevement.integrations.megatron.indexed import (
    DocumentWriter,
    open_indexed,
    read_facts,
    token_chunks,
)
from megatron_moevement.training.data.tokenizers import NullTokenizer

VOCAB_SIZE = 1000
TOKENIZER = NullTokenizer(VOCAB_SIZE)


@pytest.fixture(autouse=True)
def megatron_lets_files_go():
    """Clears the cache by which Megatron's own data sets (ours do not) stay open for ever."""
    yield
    _IndexReader.__getitem__.cache_clear()


def write(prefix: Path, num_documents: int, first: int = 0) -> str:
    """Writes documents; every token of document i is `first + i`."""
    rng = np.random.default_rng(first)
    writer = DocumentWriter(prefix, VOCAB_SIZE)
    for number in range(num_documents):
        length = int(rng.integers(10, 60))
        writer.add(np.full(length, first + number), [length])
    writer.finish()
    return str(prefix)


def request_of(**changes: object) -> DatasetRequest:
    values = {
        "samples": SampleCounts(150, 20, 10),
        "seq_length": 16,
        "seed": 5,
        "tokenizer": TOKENIZER,
        **changes,
    }
    if "blend" in changes:
        values.setdefault("split", (8, 1, 1))
    return DatasetRequest(**values)


def build(**changes: object):
    return build_datasets(request_of(**changes), IndexRole.BUILDER)


def content(dataset, count: int) -> torch.Tensor:
    samples = [dataset[index] for index in range(count)]
    return torch.stack([torch.cat([s["tokens"], s["labels"]]) for s in samples])


def digest(dataset, count: int) -> str:
    return hashlib.sha256(content(dataset, count).numpy().tobytes()).hexdigest()


def built_by_megatron(kind, sizes, **config):
    config = GPTDatasetConfig(
        random_seed=5,
        sequence_length=16,
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **config,
    )
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()


@pytest.mark.parametrize("weights", [None, (1.0,)], ids=["one data set", "a blend of one data set"])
def test_samples_are_those_of_megatrons_own_builder(tmp_path, weights):
    prefix = write(tmp_path / "a", 100)
    ours = build(blend=((prefix,), weights))
    blend = ([prefix], weights and list(weights))
    theirs = built_by_megatron(GPTDataset, [150, 20, 10], blend=blend, split="8,1,1")
    for mine, other, count in zip(
        (ours.train, ours.valid, ours.test), theirs, (150, 20, 10), strict=True
    ):
        assert len(mine) == len(other)
        assert torch.equal(content(mine, count), content(other, count))


@pytest.mark.parametrize("threads", [1, 3])
def test_blends_are_those_of_megatrons_own_builder(tmp_path, threads):
    prefixes = [write(tmp_path / f"d{n}", 60, 100 * n) for n in range(3)]
    weights = [0.2, 0.5, 0.3]
    ours = build(blend=(prefixes, weights), builder_threads=threads).train
    (theirs, *_) = built_by_megatron(
        GPTDataset, [150, 20, 10], blend=(prefixes, weights), split="8,1,1"
    )
    assert torch.equal(content(ours, 150), content(theirs, 150))
    sources = content(ours, 150)[:, 0] // 100
    assert torch.bincount(sources).tolist() == [30, 75, 45]


def test_a_blend_without_weights_takes_every_sample_once(tmp_path):
    prefixes = [write(tmp_path / f"d{n}", 60, 100 * n) for n in range(2)]
    ours = build(blend=(prefixes, None), samples=SampleCounts(150, 0, 0)).train
    (theirs, *_) = built_by_megatron(GPTDataset, [150, 1, 1], blend=(prefixes, None), split="8,1,1")
    assert torch.equal(content(ours, 150), content(theirs, 150))


def test_mock_data_is_megatrons(tmp_path):
    ours = build()
    theirs = built_by_megatron(MockGPTDataset, [150, 20, 10])
    assert torch.equal(content(ours.train, 150), content(theirs[0], 150))
    assert torch.equal(content(ours.valid, 20), content(theirs[1], 20))


def test_splits_share_no_document(tmp_path):
    prefix = write(tmp_path / "a", 100)
    built = build(blend=((prefix,), None), samples=SampleCounts(1500, 200, 200))
    documents = [
        set(content(dataset, len(dataset)).flatten().tolist())
        for dataset in (built.train, built.valid, built.test)
    ]
    assert [len(found) for found in documents] == [80, 10, 10]
    assert len(set.union(*documents)) == 100


def test_each_split_may_have_its_own_data(tmp_path):
    a, b = write(tmp_path / "a", 60), write(tmp_path / "b", 60, 500)
    built = build(blend_per_split=(((a,), None), ((b,), (1.0,)), None))
    assert content(built.train, 150).max() < 500 <= content(built.valid, 20).min()
    assert built.test is None


def test_a_split_of_which_nothing_is_drawn_is_not_built(tmp_path):
    prefix = write(tmp_path / "a", 100)
    built = build(blend=((prefix,), None), samples=SampleCounts(10, 0, 0), split=(1, 0, 0))
    assert len(built.train) >= 10
    assert built.valid is None
    assert built.test is None


def test_seeds_give_different_orders_of_the_same_data(tmp_path):
    prefix = write(tmp_path / "a", 100)
    one, two = (build(blend=((prefix,), None), seed=seed).train for seed in (1, 2))
    assert not torch.equal(content(one, 50), content(two, 50))


def test_end_of_document_shapes_loss_mask_and_positions(tmp_path):
    writer = DocumentWriter(tmp_path / "a", VOCAB_SIZE)
    for _ in range(50):
        writer.add(np.array([1, 2, VOCAB_SIZE]), [3])
    writer.finish()
    built = build(
        blend=((str(tmp_path / "a"),), None),
        eod_mask_loss=True,
        reset_position_ids=True,
        samples=SampleCounts(5, 0, 0),
    )
    sample = built.train[0]
    ends = sample["tokens"] == VOCAB_SIZE
    assert torch.equal(sample["loss_mask"] == 0, ends)
    assert sample["position_ids"].max() == 2
    assert (sample["position_ids"][1:][ends[:-1]] == 0).all()


def test_reading_bin_files_gives_the_same_as_mapping_them(tmp_path):
    prefix = write(tmp_path / "a", 100)
    mapped = build(blend=((prefix,), None)).train
    read = build(blend=((prefix,), None), mmap_bin_files=False).train
    assert torch.equal(content(mapped, 150), content(read, 150))


def index_files(cache: Path) -> dict[str, tuple[int, int]]:
    found = (path for path in cache.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def test_the_second_build_reads_the_files_of_the_first(tmp_path, monkeypatch):
    prefix, cache = write(tmp_path / "a", 100), tmp_path / "cache"
    changes = {"blend": ((prefix,), None), "index_cache_path": str(cache)}
    first = build(**changes)
    files = index_files(cache)
    assert len(files) == 3 * 4
    monkeypatch.delattr(helpers, "build_sample_idx")  # whoever builds anew fails
    second = build(**changes)
    assert index_files(cache) == files
    order = content(first.train, len(first.train))
    assert torch.equal(order, content(second.train, len(second.train)))
    assert not first.train.config.mock
    for path in cache.glob("*-train/shuffle_index.npy"):
        np.save(path, np.load(path)[::-1])
    assert torch.equal(order.flip(0), content(build(**changes).train, len(order)))


def test_data_prepared_anew_meets_no_old_index_files(tmp_path):
    prefix = write(tmp_path / "a", 100)
    build(blend=((prefix,), None))
    write(tmp_path / "a", 40, 300)
    assert content(build(blend=((prefix,), None)).train, 150).min() >= 300


def test_the_reader_waits_and_the_builder_builds_before(tmp_path):
    prefix, cache = write(tmp_path / "a", 100), tmp_path / "cache"
    request = request_of(blend=((prefix,), None), index_cache_path=str(cache))
    seen = []
    build_datasets(request, IndexRole.READER, lambda: seen.append(cache.exists()))
    cache.rename(tmp_path / "other")
    build_datasets(request, IndexRole.BUILDER, lambda: seen.append(cache.exists()))
    assert seen == [False, True]


def test_a_failing_builder_still_comes_to_the_barrier(tmp_path):
    reached = []
    request = request_of(blend=((str(tmp_path / "none"),), None))
    with pytest.raises(UserError, match=r"none.idx"):
        build_datasets(request, IndexRole.BUILDER, lambda: reached.append(True))
    assert reached == [True]


def test_an_empty_split_is_refused(tmp_path):
    prefix = write(tmp_path / "a", 100)
    with pytest.raises(UserError, match="100 documents leave none for the test split"):
        build(blend=((prefix,), None), split=(969, 30, 1))


def test_too_little_data_for_a_blend_without_weights_is_refused(tmp_path):
    prefixes = [write(tmp_path / f"d{n}", 10, 100 * n) for n in range(2)]
    with pytest.raises(UserError, match="give the data paths weights to repeat them"):
        build(blend=(prefixes, None), samples=SampleCounts(10**4, 0, 0))


def test_a_training_split_without_data_is_refused(tmp_path):
    prefix = write(tmp_path / "a", 100)
    with pytest.raises(UserError, match="no training data"):
        build(blend_per_split=(None, ((prefix,), None), None))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    prefix = write(tmp_path / "a", 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--data-cache-path"):
        build(blend=((prefix,), None), index_cache_path=str(tmp_path / "file"))


def test_damaged_index_files_are_refused(tmp_path):
    prefix, cache = write(tmp_path / "a", 100), tmp_path / "cache"
    changes = {"blend": ((prefix,), None), "index_cache_path": str(cache)}
    build(**changes)
    for path in cache.rglob("sample_index.npy"):
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match="remove the folder"):
        build(**changes)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_cut_short_is_refused(tmp_path, suffix):
    prefix = write(tmp_path / "a", 100)
    path = Path(prefix + suffix)
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(UserError, match=f"{suffix}: .* bytes, by its index"):
        open_indexed(prefix)


def test_a_foreign_index_is_refused(tmp_path):
    prefix = write(tmp_path / "a", 100)
    Path(prefix + ".idx").write_bytes(b"something else that is long enough to be a header")
    with pytest.raises(UserError, match="not the index of a Megatron data set"):
        read_facts(prefix)


def test_an_index_of_other_data_is_refused(tmp_path):
    prefix = write(tmp_path / "a", 100)
    os.replace(write(tmp_path / "b", 50) + ".idx", prefix + ".idx")
    with pytest.raises(UserError, match=r"a.bin: .* bytes, by its index"):
        read_facts(prefix)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, "uint16"), (65500, "int32")])
def test_what_is_written_is_read(tmp_path, vocab_size, dtype):
    documents = [[1, 2, 3], [vocab_size - 1], [5, 6]]
    writer = DocumentWriter(tmp_path / "a", vocab_size)
    writer.add(np.array([1, 2, 3, vocab_size - 1]), [3, 1])
    writer.add(np.array([5, 6]), [2])
    writer.finish()
    prefix = str(tmp_path / "a")
    facts = read_facts(prefix)
    assert (facts.documents, facts.tokens, facts.dtype.name) == (3, 6, dtype)
    dataset = open_indexed(prefix)
    assert [dataset.get(index).tolist() for index in range(3)] == documents
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert np.concatenate(list(token_chunks(prefix))).tolist() == [1, 2, 3, vocab_size - 1, 5, 6]


def join() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def build_on_ranks(folder: str, role_of_others: str) -> str:
    """Builds a blend and returns a digest of its samples."""
    join()
    role = IndexRole.BUILDER if dist.get_rank() == 0 else IndexRole(role_of_others)
    prefixes = (f"{folder}/a", f"{folder}/b")
    built = build_datasets(
        request_of(blend=(prefixes, (0.4, 0.6)), index_cache_path=f"{folder}/cache"),
        role,
        dist.barrier,
    )
    result = digest(built.train, 150) + digest(built.valid, 20)
    dist.destroy_process_group()
    return result


@pytest.mark.distributed
@pytest.mark.parametrize("role_of_others", [role.value for role in IndexRole])
def test_all_ranks_get_the_same_data_and_leave_whole_files(
    tmp_path, megatron_fork_server, role_of_others
):
    write(tmp_path / "a", 60)
    write(tmp_path / "b", 60, 500)
    job = megatron_fork_server.run(
        build_on_ranks, world_size=3, args=[str(tmp_path), role_of_others]
    )
    assert len(set(job.check().values)) == 1
    folders = sorted((tmp_path / "cache").iterdir())
    assert len(folders) == 2 * 3
    assert all(len(list(folder.iterdir())) == 4 for folder in folders)


def rebuild_on_the_last_rank(folder: str) -> str:
    """Only the last rank builds; the others wait at the end and take no part."""
    join()
    result = ""
    if dist.get_rank() == dist.get_world_size() - 1:
        blend = ((f"{folder}/a", f"{folder}/b"), (0.4, 0.6))
        result = digest(build(blend=blend).train, 150)
    dist.barrier()
    dist.destroy_process_group()
    return result


@pytest.mark.distributed
def test_one_rank_of_a_running_job_builds_alone(tmp_path, megatron_fork_server):
    blend = ((write(tmp_path / "a", 60), write(tmp_path / "b", 60, 500)), (0.4, 0.6))
    job = megatron_fork_server.run(rebuild_on_the_last_rank, world_size=2, args=[str(tmp_path)])
    assert job.check().values == ("", digest(build(blend=blend).train, 150))
