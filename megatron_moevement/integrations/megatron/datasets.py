# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's GPT data sets and blends, built on each rank by itself.

Megatron's builder synchronises with barriers of the whole world and lets rank 0 alone write index
files. Here a rank never waits for the world: one rank per node builds first, the caller's barrier
lets the others follow, and they find the files. A rank that finds none (another node's disk, or no
process group at all) builds them itself, to the same bytes. Index files appear as whole folders by
one rename, so nobody reads half of them.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.indexed import CheckedIndexedDataset, open_indexed

Blend = tuple[Sequence[str], Sequence[float] | None]
"""Prefixes and weights, as Megatron-Core's configuration takes them."""

_INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")
Indices = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


class SampleCounts(NamedTuple):
    """Samples that will be drawn of each split; 0: the split is not built."""

    train: int
    valid: int
    test: int


@dataclasses.dataclass(frozen=True)
class DatasetRequest:
    """What to build. Neither `blend` nor `blend_per_split`: mock data.

    Attributes:
        seed: of the order of documents and samples.
        tokenizer: gives `vocab_size`, `eod` and `unique_identifiers`.
        blend: data of all splits, with `split`.
        split: shares of train, validation and test.
        blend_per_split: data of train, validation and test.
        index_cache_path: folder of the index files; None: a folder beside each data set.
        reset_position_ids: positions start anew after an end-of-document.
        eod_mask_loss: no loss where the input is an end-of-document.
        builder_threads: threads that build the data sets of a blend.
    """

    samples: SampleCounts
    seq_length: int
    seed: int
    tokenizer: Any
    blend: Blend | None = None
    split: tuple[float, float, float] | None = None
    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None
    index_cache_path: str | None = None
    mmap_bin_files: bool = True
    reset_position_ids: bool = False
    eod_mask_loss: bool = False
    builder_threads: int = 1


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The splits, each a map from global sample index to sample; None: none asked for, or none."""

    train: Any
    valid: Any
    test: Any


class IndexRole(Enum):
    """What a rank does about index files: one rank per node builds, the others read."""

    BUILDER = "builder"
    READER = "reader"


def build_datasets(
    request: DatasetRequest, role: IndexRole, barrier: Callable[[], None] = lambda: None
) -> Datasets:
    """Builds the data sets. Every rank that needs data calls it.

    Args:
        request: what to build, the same on all ranks.
        role: whether this rank builds before the barrier or reads after it.
        barrier: returns when every rank of the node has called it; called once, also when building
            fails, so that the others come to their own error instead of waiting.

    Raises:
        UserError: data are damaged or too small, or index files can't be written.
    """
    if role is IndexRole.READER:
        barrier()
        return _build(request)
    try:
        return _build(request)
    finally:
        barrier()


@dataclasses.dataclass
class _Config(GPTDatasetConfig):  # type: ignore[misc]
    """Adds our own place of index files: with `path_to_cache` Megatron would use its own."""

    index_cache_path: str | None = None


class IndexedGptDataset(GPTDataset):  # type: ignore[misc]
    """A `GPTDataset` that shares its index files by atomic renames, without a process group."""

    dataset: CheckedIndexedDataset
    config: _Config

    def __init__(  # noqa: PLR0917  (Megatron's builder passes these by position)
        self,
        indexed_dataset: CheckedIndexedDataset,
        dataset_path: str | None,
        indexed_indices: npt.NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: _Config,
    ) -> None:
        # Megatron adds up epochs until there are tokens enough: for ever, if there are none
        if not int(indexed_dataset.sequence_lengths[indexed_indices].sum()):
            raise UserError(
                f"data {dataset_path}: its {len(indexed_dataset)} documents leave none for the "
                f"{index_split.name} split; give more documents or another --split, such as 1,0,0"
            )
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str, config: GPTDatasetConfig
    ) -> CheckedIndexedDataset:
        """Opens one data set, checked."""
        return open_indexed(dataset_path, mmap=config.mmap_bin_files)

    def _build_document_sample_shuffle_indices(self) -> Indices:
        # the description lacks the data's content: data prepared anew must not meet old indices
        identity = f"{self.unique_description}\n{self.dataset.fingerprint}"
        key = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        cache = self.config.index_cache_path or f"{self.dataset.path_prefix}.cache"
        folder = Path(cache) / f"{key}-{self.index_split.name}"
        if not folder.is_dir():
            try:
                _publish(folder, self._build_in_memory(), identity)
            except OSError as error:
                raise UserError(
                    f"{folder}: can't write index files: {error.strerror}; name another folder "
                    "by --data-cache-path"
                ) from error
        return _load(folder)

    def _build_in_memory(self) -> Indices:
        """Has Megatron build the arrays without reading or writing files, as for mock data."""
        shared = self.config
        self.config = copy.copy(shared)
        self.config.mock = True
        try:
            indices: Indices = super()._build_document_sample_shuffle_indices()
        finally:
            self.config = shared
        return indices


class RankLocalBuilder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]
    """Megatron's builder without its barriers: what is built is the same on each rank."""

    @staticmethod
    def build_generic_dataset(
        kind: Callable[..., Any],
        is_built_on_rank: Callable[[], bool],
        synchronize_ranks: bool,
        *args: Any,
    ) -> Any:
        """Builds a data set on the rank that asks for it, as Megatron's own does on all."""
        del is_built_on_rank, synchronize_ranks
        return kind(*args)

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: list[Any], sizes_per_dataset: list[list[int]]
    ) -> list[list[Any]]:
        def build(prefix: str, sizes: list[int]) -> list[Any]:
            splits: list[Any] = self._build_megatron_dataset_splits(prefix, split, sizes, False)
            return splits

        with ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
            rows = list(pool.map(build, prefixes, sizes_per_dataset))
        return [list(column) for column in zip(*rows, strict=True)]


def _build(request: DatasetRequest) -> Datasets:
    config = megatron_config(request)
    kind = MockGPTDataset if config.mock else IndexedGptDataset
    with without_cache_warnings():
        builder = RankLocalBuilder(kind, list(request.samples), lambda: True, config)
        built = builder.build()
    for split, dataset, needed in zip(Split, built, request.samples, strict=True):
        if split is Split.train and dataset is None and needed:
            raise UserError("no training data: give the train split a share, or a data path")
        if dataset is not None and len(dataset) < needed:
            raise UserError(
                f"the {split.name} split has {len(dataset)} samples of {request.seq_length} tokens "
                f"in one epoch and {needed} are needed; give the data paths weights to repeat "
                "them, or run fewer iterations"
            )
    return Datasets(*built)


def megatron_config(request: DatasetRequest) -> _Config:
    """Returns Megatron-Core's configuration of a request."""
    wanted = [samples > 0 for samples in request.samples]
    per_split = None
    if request.blend_per_split is not None:
        per_split = [
            _as_lists(blend) if use else None
            for blend, use in zip(request.blend_per_split, wanted, strict=True)
        ]
    config = _Config(
        random_seed=request.seed,
        sequence_length=request.seq_length,
        blend=_as_lists(request.blend),
        blend_per_split=per_split,
        split=",".join(f"{share:.17f}" for share in request.split) if request.split else None,
        num_dataset_builder_threads=request.builder_threads,
        mmap_bin_files=request.mmap_bin_files,
        tokenizer=request.tokenizer,
        reset_position_ids=request.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=request.eod_mask_loss,
        create_attention_mask=False,
        index_cache_path=request.index_cache_path,
    )
    if config.split_matrix is not None:
        matrix = zip(config.split_matrix, wanted, strict=True)
        config.split_matrix = [bookends if use else None for bookends, use in matrix]
    return config


def _as_lists(blend: Blend | None) -> tuple[list[str], list[float] | None] | None:
    if blend is None:
        return None
    prefixes, weights = blend
    return list(prefixes), None if weights is None else list(weights)


def _publish(folder: Path, indices: Indices, identity: str) -> None:
    """Writes the arrays into a folder that appears whole; an equal one may be there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, array in zip(_INDEX_NAMES, indices, strict=True):
            with (staging / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        (staging / "description.txt").write_text(identity, "utf-8")
        staging.chmod(0o755)  # mkdtemp's 0700 would lock other users out of a shared cache
        staging.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _load(folder: Path) -> Indices:
    try:
        document, sample, shuffle = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in _INDEX_NAMES
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: damaged index files ({error}); remove the folder") from error
    return document, sample, shuffle


@contextmanager
def without_cache_warnings() -> Iterator[None]:
    """Silences Megatron's warning that it saves no index files: that is done here."""
    names = ("gpt_dataset", "blended_dataset")
    loggers = [logging.getLogger(f"megatron.core.datasets.{name}") for name in names]

    def passes(record: logging.LogRecord) -> bool:
        return "because path_to_cache is None" not in record.getMessage()

    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)
