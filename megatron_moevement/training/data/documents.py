# SPDX-License-Identifier: Apache-2.0
"""Finding documents in files and folders, and turning them into tokens, batch by batch.

Light on purpose (no torch): the worker processes of `moevement data prepare` import it. How the
work is cut depends on the input alone, so the output does not depend on the number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_moevement.errors import UserError
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import Tokenizer

BATCH_BYTES = 1 << 20
"""Input that one task takes on, more only where one text file is larger."""

_JSONL_SUFFIXES = (".jsonl", ".ndjson")


class InputFormat(Enum):
    """What a file holds: one document, or one JSON object per line; AUTO: by its suffix."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"


@dataclasses.dataclass(frozen=True)
class Search:
    """Which files of a folder are read: `patterns` match names; `excluded` folders and files."""

    patterns: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    input_format: InputFormat = InputFormat.AUTO


@dataclasses.dataclass(frozen=True)
class Piece:
    """The bytes `start` to `end` of a file: all of a text, or the lines that start there."""

    path: Path
    name: str
    input_format: InputFormat
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Reading:
    """How documents become tokens; the same in every worker."""

    tokenizer: TokenizerSpec
    json_keys: tuple[str, ...]
    append_eod: bool
    dtype: str


@dataclasses.dataclass(frozen=True)
class TokenizedBatch:
    """Documents of one batch.

    Attributes:
        ids: tokens of all documents, one after the other.
        empty_documents: documents left out because they hold no token.
        read_bytes: bytes of input.
        digests: SHA-256 of name and content of each piece.
    """

    ids: npt.NDArray[Any]
    lengths: list[int]
    empty_documents: int
    read_bytes: int
    digests: list[bytes]


def find_batches(inputs: Sequence[Path], search: Search) -> list[tuple[Piece, ...]]:
    """Lists the work in the order of the output: inputs as given, folders sorted by path.

    Raises:
        UserError: an input does not exist, can't be listed, or holds no file that matches.
    """
    pieces: list[Piece] = []
    for path in inputs:
        if path.is_dir():
            found = _files_of(path, search)
        elif path.is_file():
            found = [(path, path.name)]
        else:
            raise UserError(f"--input {path}: no such file or folder")
        for file, name in found:
            pieces.extend(_pieces_of(file, name, search.input_format))
    if not pieces:
        raise UserError(f"--input {' '.join(map(str, inputs))}: nothing but empty files")
    return list(_batches(pieces))


def tokenize_batch(
    tokenizer: Tokenizer, reading: Reading, batch: Sequence[Piece]
) -> TokenizedBatch:
    """Reads and tokenizes the documents of a batch.

    Raises:
        UserError: a file can't be read, is no text under the error policy, or no JSON.
    """
    parts: list[npt.NDArray[Any]] = []
    lengths: list[int] = []
    digests: list[bytes] = []
    empty, read_bytes = 0, 0
    end = np.array([tokenizer.eod] if reading.append_eod else [], dtype=reading.dtype)
    for piece in batch:
        digest = hashlib.sha256(piece.name.encode("utf-8", "surrogateescape") + b"\0")
        for offset, content in _contents(piece):
            digest.update(content)
            read_bytes += len(content)
            ids = _tokenize(tokenizer, reading, piece, offset, content)
            if ids is None or not ids.size:
                empty += 1
                continue
            parts += (ids.astype(reading.dtype), end)
            lengths.append(ids.size + end.size)
        digests.append(digest.digest())
    ids = np.concatenate(parts) if parts else np.array([], dtype=reading.dtype)
    return TokenizedBatch(ids, lengths, empty, read_bytes, digests)


def _files_of(folder: Path, search: Search) -> list[tuple[Path, str]]:
    def excluded(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in search.excluded)

    def fail(error: OSError) -> None:
        raise UserError(f"--input {error.filename}: {error.strerror}")

    files: list[tuple[str, Path]] = []
    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not excluded(name)]
        for name in names:
            path = Path(root, name)
            wanted = any(fnmatchcase(name, pattern) for pattern in search.patterns)
            if wanted and not excluded(name) and path.is_file():
                files.append((path.relative_to(folder).as_posix(), path))
    if not files:
        raise UserError(
            f"--input {folder}: no file matches {' '.join(search.patterns)}; see --pattern"
        )
    return [(path, name) for name, path in sorted(files)]


def _pieces_of(path: Path, name: str, input_format: InputFormat) -> Iterator[Piece]:
    if input_format is InputFormat.AUTO:
        jsonl = path.suffix.lower() in _JSONL_SUFFIXES
        input_format = InputFormat.JSONL if jsonl else InputFormat.TEXT
    size_bytes = path.stat().st_size
    step = BATCH_BYTES if input_format is InputFormat.JSONL else max(size_bytes, 1)
    for start in range(0, max(size_bytes, 1), step):
        yield Piece(path, name, input_format, start, min(start + step, size_bytes))


def _batches(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    batch: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        batch.append(piece)
        size_bytes += piece.end - piece.start
        if size_bytes >= BATCH_BYTES:
            yield tuple(batch)
            batch, size_bytes = [], 0
    if batch:
        yield tuple(batch)


def _contents(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yields (offset in the file, content): the file, or each line that starts in the piece."""
    try:
        with piece.path.open("rb") as file:
            if piece.input_format is InputFormat.TEXT:
                yield 0, file.read()
                return
            if piece.start > 0:
                file.seek(piece.start - 1)
                file.readline()
            while (offset := file.tell()) < piece.end:
                yield offset, file.readline()
    except OSError as error:
        raise UserError(f"{piece.path}: {error.strerror}; mend or exclude it") from error


def _tokenize(
    tokenizer: Tokenizer, reading: Reading, piece: Piece, offset: int, content: bytes
) -> npt.NDArray[Any] | None:
    """Returns the ids of one document, or None for a blank line."""
    where = str(piece.path)
    try:
        if piece.input_format is InputFormat.TEXT:
            return tokenizer.tokenize(content)
        where += f", the line at byte {offset}"
        line = content.decode("utf-8", reading.tokenizer.decode_errors.value).strip()
        return tokenizer.tokenize(_text_of(line, reading.json_keys, where)) if line else None
    except UnicodeError as error:
        raise UserError(
            f"{where}: no UTF-8 ({error}); choose --decode-errors replace or ignore, or "
            "--tokenizer-type ByteTokenizer, which takes the bytes of text files as they are"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{where}: {reading.tokenizer.type.value} can't take it: {error}"
        ) from error


def _text_of(line: str, keys: Sequence[str], where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    values: list[str] = []
    for key in keys:
        value = record.get(key) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise UserError(f"{where}: no text under the key {key!r}; see --json-keys")
        values.append(value)
    return "\n".join(values)
