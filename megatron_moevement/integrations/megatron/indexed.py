# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's indexed data sets, pairs of files `.bin` and `.idx`: checked reading, writing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from megatron_moevement.errors import UserError

MAX_DOCUMENT_TOKENS = 2**31 - 1
"""The index stores lengths as int32."""

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_SEQUENCE_BYTES = 4 + 8  # length int32, pointer int64
_DOCUMENT_BYTES = 8
_SCAN_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class IndexedFacts:
    """What the index says of its data set."""

    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int


def read_facts(prefix: str) -> IndexedFacts:
    """Reads the header and the lengths of a data set, and checks both files against them.

    Raises:
        UserError: a file is missing, foreign, cut short, or holds nothing.
    """
    idx_path, bin_path = get_idx_path(prefix), get_bin_path(prefix)
    try:
        with open(idx_path, "rb") as index:
            header = index.read(_HEADER.size)
            facts = _parse(idx_path, header, index)
        idx_bytes, bin_bytes = os.path.getsize(idx_path), os.path.getsize(bin_path)
    except OSError as error:
        raise UserError(
            f"data {prefix}: {error.filename}: {error.strerror}; make it with "
            "`moevement data prepare`"
        ) from error
    _check_size(
        idx_path,
        idx_bytes,
        _HEADER.size + facts.sequences * _SEQUENCE_BYTES + (facts.documents + 1) * _DOCUMENT_BYTES,
    )
    _check_size(bin_path, bin_bytes, facts.tokens * facts.dtype.itemsize)
    if facts.tokens == 0:
        raise UserError(f"data {prefix}: no tokens; prepare it from text that is not empty")
    return facts


def _parse(idx_path: str, header: bytes, index: Any) -> IndexedFacts:
    foreign = UserError(f"{idx_path}: not the index of a Megatron data set; prepare the data again")
    if len(header) < _HEADER.size:
        raise foreign
    magic, version, code, sequences, boundaries = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in [member.value for member in DType]:
        raise foreign
    lengths = np.fromfile(index, dtype=np.int32, count=sequences)
    tokens = int(lengths.sum(dtype=np.int64))
    return IndexedFacts(np.dtype(DType.dtype_from_code(code)), sequences, boundaries - 1, tokens)


def _check_size(path: str, actual_bytes: int, expected_bytes: int) -> None:
    if actual_bytes != expected_bytes:
        raise UserError(
            f"{path}: {actual_bytes} bytes, by its index {expected_bytes}; the file is damaged "
            "or of another data set, prepare the data again"
        )


class CheckedIndexedDataset(IndexedDataset):  # type: ignore[misc]
    """An `IndexedDataset` whose files fit each other; `fingerprint` names the index's content."""

    def __init__(self, prefix: str, *, mmap: bool = True) -> None:
        super().__init__(prefix, multimodal=False, mmap=mmap)
        with open(get_idx_path(prefix), "rb") as index:
            self.fingerprint = hashlib.file_digest(index, "blake2b").hexdigest()[:32]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Returns tokens of one document: `length` from `offset` on, all by default.

        Megatron's own keeps the index's entries, and with them its open files, in a cache of the
        process that outlives the data set.
        """
        dtype = np.dtype(self.index.dtype)
        if length is None:
            length = int(self.index.sequence_lengths[idx]) - offset
        start = int(self.index.sequence_pointers[idx]) + offset * dtype.itemsize
        tokens: npt.NDArray[Any] = self.bin_reader.read(
            dtype=dtype.type, count=int(length), offset=start
        )
        return tokens


def open_indexed(prefix: str, *, mmap: bool = True) -> CheckedIndexedDataset:
    """Opens a data set.

    Args:
        prefix: path without `.bin` and `.idx`.
        mmap: map the `.bin` file; otherwise read it piece by piece.

    Raises:
        UserError: see `read_facts`.
    """
    read_facts(prefix)
    return CheckedIndexedDataset(prefix, mmap=mmap)


def token_chunks(prefix: str) -> Iterator[npt.NDArray[Any]]:
    """Yields all tokens of a data set in order, some millions at a time."""
    facts = read_facts(prefix)
    tokens = np.memmap(get_bin_path(prefix), dtype=facts.dtype, mode="r")
    for start in range(0, facts.tokens, _SCAN_TOKENS):
        yield np.asarray(tokens[start : start + _SCAN_TOKENS])


class DocumentWriter:
    """Writes documents, one sequence each, to `PREFIX.bin` and, in the end, `PREFIX.idx`.

    Args:
        prefix: path without `.bin` and `.idx`; both are overwritten.
        vocab_size: decides the smallest type that holds every id.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.dtype = np.dtype(DType.optimal_dtype(vocab_size))
        self._idx_path = get_idx_path(str(prefix))
        self._builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=self.dtype.type)

    def add(self, ids: npt.NDArray[Any], lengths: Sequence[int]) -> None:
        """Appends documents.

        Args:
            ids: the tokens of all documents, one after the other.
        """
        start = 0
        for length in lengths:
            self._builder.add_document(ids[start : start + length], [length])
            start += length
        if start != len(ids):
            raise ValueError(f"documents of {start} tokens in all, and {len(ids)} are given")

    def finish(self) -> None:
        """Writes the index; the data set is whole after it."""
        self._builder.finalize(self._idx_path)

    def close(self) -> None:
        """Closes the data file; without `finish` there is no data set."""
        self._builder.data_file.close()
