# SPDX-License-Identifier: Apache-2.0
"""Preparation of text for training: the work of `moevement data prepare`.

Files appear under their final names only when all are whole, the `.idx` last: a data set without
it does not exist. Until then everything lies in a folder `.NAME.partial` beside them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.indexed import MAX_DOCUMENT_TOKENS, DocumentWriter
from megatron_moevement.training.checkpoints import sync
from megatron_moevement.training.data.documents import (
    Piece,
    Reading,
    Search,
    TokenizedBatch,
    find_batches,
)
from megatron_moevement.training.data.manifest import Manifest, Source, manifest_path
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import Tokenizer
from megatron_moevement.training.data.worker_pool import tokenized_batches


class Existing(Enum):
    """What happens to a data set that is there already."""

    REFUSE = "refuse"
    REPLACE = "replace"


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What to prepare and where to."""

    inputs: tuple[Path, ...]
    prefix: str
    tokenizer: TokenizerSpec
    search: Search
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    existing: Existing = Existing.REFUSE


def prepare(work: Preparation, on_progress: Callable[[int, int], None]) -> Manifest:
    """Makes `PREFIX.bin`, `PREFIX.idx` and the manifest `PREFIX.json`.

    Args:
        work: what to prepare; the result does not depend on its number of workers.
        on_progress: called with the bytes read so far and in all.

    Raises:
        UserError: bad input, or output that can't be written; nothing is written then.
    """
    tokenizer = work.tokenizer.build()
    batches = find_batches(work.inputs, work.search)
    _check_output(work)
    try:
        with _staging_folder(work.prefix) as staging:
            manifest = _write(work, tokenizer, batches, staging / "data", on_progress)
            _publish(staging / "data", work.prefix)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, perhaps for lack of memory; try fewer --workers"
        ) from error
    except OSError as error:
        where = error.filename or work.prefix
        raise UserError(f"{where}: {error.strerror}; nothing was prepared") from error
    return manifest


def output_paths(prefix: str) -> tuple[Path, Path, Path]:
    """Returns the files of a data set, in the order in which they appear."""
    return Path(f"{prefix}.bin"), manifest_path(prefix), Path(f"{prefix}.idx")


class _Tally:
    """What the manifest says about the tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._digest = hashlib.sha256()
        self.documents = 0
        self.empty_documents = 0
        self.read_bytes = 0

    def add(self, batch: TokenizedBatch) -> None:
        self._counts += np.bincount(batch.ids, minlength=len(self._counts))
        for digest in batch.digests:
            self._digest.update(digest)
        self.documents += len(batch.lengths)
        self.empty_documents += batch.empty_documents
        self.read_bytes += batch.read_bytes

    def manifest(
        self, work: Preparation, tokenizer: Tokenizer, dtype: np.dtype[np.generic], files: int
    ) -> Manifest:
        return Manifest(
            tokenizer=dict(tokenizer.unique_identifiers),
            decode_errors=work.tokenizer.decode_errors.value,
            append_eod=work.append_eod,
            dtype=dtype.name,
            documents=self.documents,
            empty_documents=self.empty_documents,
            tokens=int(self._counts.sum()),
            max_token_id=int(np.flatnonzero(self._counts)[-1]),
            unigram_entropy_nats=entropy_nats(self._counts),
            source=Source(files, self.read_bytes, self._digest.hexdigest()),
        )


def entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Returns the entropy, in nats, of the distribution that the counts are a sample of."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _write(
    work: Preparation,
    tokenizer: Tokenizer,
    batches: Sequence[tuple[Piece, ...]],
    prefix: Path,
    on_progress: Callable[[int, int], None],
) -> Manifest:
    total_bytes = sum(piece.end - piece.start for batch in batches for piece in batch)
    tally = _Tally(tokenizer.vocab_size)
    writer = DocumentWriter(prefix, tokenizer.vocab_size)
    reading = Reading(work.tokenizer, work.json_keys, work.append_eod, writer.dtype.name)
    try:
        for batch in tokenized_batches(tokenizer, reading, batches, work.workers):
            _check_lengths(batch)
            writer.add(batch.ids, batch.lengths)
            tally.add(batch)
            on_progress(tally.read_bytes, total_bytes)
        if not tally.documents:
            raise UserError(f"--input {' '.join(map(str, work.inputs))}: no document has a token")
        writer.finish()
    finally:
        writer.close()
    files = len({piece.path for batch in batches for piece in batch})
    manifest = tally.manifest(work, tokenizer, writer.dtype, files)
    manifest_path(str(prefix)).write_text(manifest.to_json(), "utf-8")
    return manifest


def _check_lengths(batch: TokenizedBatch) -> None:
    longest = max(batch.lengths, default=0)
    if longest > MAX_DOCUMENT_TOKENS:
        raise UserError(
            f"a document of {longest} tokens: Megatron's index ends at {MAX_DOCUMENT_TOKENS}; "
            "split the file"
        )


def _check_output(work: Preparation) -> None:
    if not Path(work.prefix).name or work.prefix.endswith(os.sep):
        raise UserError(f"--output-prefix {work.prefix}: give a folder and a name")
    there = [str(path) for path in output_paths(work.prefix) if path.exists()]
    if there and work.existing is Existing.REFUSE:
        raise UserError(f"{there[0]} exists; choose another --output-prefix or give --overwrite")


@contextmanager
def _staging_folder(prefix: str) -> Iterator[Path]:
    """A folder beside the output that one process holds at a time, removed in the end.

    What a killed run left there is cleared. Parents made for it go again, if it comes to nothing.
    """
    final = Path(prefix)
    new_parents = [parent for parent in final.parents if not parent.exists()]
    try:
        staging = final.parent / f".{final.name}.partial"
        staging.mkdir(parents=True, exist_ok=True)
        with _exclusive(staging, prefix):
            try:
                for leftover in staging.iterdir():
                    leftover.unlink()
                yield staging
            finally:
                shutil.rmtree(staging)
    finally:
        for parent in new_parents:
            with suppress(OSError):  # not empty: it holds the result
                parent.rmdir()


@contextmanager
def _exclusive(folder: Path, prefix: str) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is preparing {prefix}; wait for it or choose another "
                "--output-prefix"
            ) from error
        yield
    finally:
        os.close(lock)


def _publish(staged: Path, prefix: str) -> None:
    pairs = list(zip(output_paths(str(staged)), output_paths(prefix), strict=True))
    for source, _ in pairs:
        sync(source)
    # until the new index is there, an old one must not lead to the new tokens
    pairs[-1][1].unlink(missing_ok=True)
    for source, target in pairs:
        os.replace(source, target)
    sync(Path(prefix).parent)
