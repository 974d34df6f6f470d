"""Text to token ids and back: bytes, a HuggingFace tokenizer from a local file, or none at all.

Light on purpose (no torch): the worker processes of `moevement data prepare` import it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as TokenizersBackend

from megatron_moevement.errors import UserError

TokenIds = npt.NDArray[np.integer[Any]]
"""One document's token ids, of any integer type."""

_KNOWN_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class TokenizerType(Enum):
    """Values of `--tokenizer-type`; HuggingFaceTokenizer and NullTokenizer as in Megatron-LM."""

    BYTE = "ByteTokenizer"
    HUGGING_FACE = "HuggingFaceTokenizer"
    NULL = "NullTokenizer"


class DecodeErrors(Enum):
    """What becomes of bytes that are no UTF-8, for tokenizers that take text."""

    STRICT = "strict"
    REPLACE = "replace"
    IGNORE = "ignore"


class Tokenizer(Protocol):
    """What data preparation and Megatron's `GPTDatasetConfig` need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-document id included."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """What two tokenizers share exactly when they give the same ids; JSON values only."""

    def tokenize(self, text: str | bytes) -> TokenIds:
        """Returns the ids of one document, without special tokens.

        Raises:
            UnicodeDecodeError: bytes that are no UTF-8, where they are needed to be.
            ValueError: text that the tokenizer can't take.
        """

    def detokenize(self, ids: Sequence[int] | TokenIds) -> str:
        """Returns the text of the ids."""


class ByteTokenizer:
    """The 256 bytes and an end-of-document id: needs no file, takes every input as it is."""

    eod = 256
    vocab_size = eod + 1

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """See `Tokenizer`."""
        return {"class": TokenizerType.BYTE.value, "vocab_size": self.vocab_size, "eod": self.eod}

    def tokenize(self, text: str | bytes) -> TokenIds:
        """See `Tokenizer`; the bytes of a lone surrogate are taken as they are, too."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8)

    def detokenize(self, ids: Sequence[int] | TokenIds) -> str:
        """See `Tokenizer`; bytes that are no UTF-8 appear as U+FFFD, end-of-document as `<eod>`."""
        parts: list[bytes] = []
        for token in np.asarray(ids).tolist():
            parts.append(b"<eod>" if token == self.eod else bytes([token]))
        return b"".join(parts).decode("utf-8", "replace")


class NullTokenizer:
    """Stands for ids that exist already: mock data, or data tokenized elsewhere.

    As in Megatron-LM, `--vocab-size N` gives the ids 0 to N-1 and N ends a document.
    """

    def __init__(self, vocab_size_without_eod: int) -> None:
        self.eod = vocab_size_without_eod
        self.vocab_size = vocab_size_without_eod + 1

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """See `Tokenizer`."""
        return {"class": TokenizerType.NULL.value, "vocab_size": self.vocab_size, "eod": self.eod}

    def tokenize(self, text: str | bytes) -> TokenIds:
        """See `Tokenizer`; the text is ids, separated by white space."""
        ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"an id outside 0 to {self.vocab_size - 1}")
        return ids

    def detokenize(self, ids: Sequence[int] | TokenIds) -> str:
        """See `Tokenizer`."""
        return " ".join(str(token) for token in np.asarray(ids).tolist())


class HuggingFaceTokenizer:
    """A HuggingFace tokenizer from a `tokenizer.json`, or a folder that holds one.

    A folder without `tokenizer.json` is loaded by `transformers`, where that is installed. Nothing
    is ever downloaded, no code of the folder is run.

    Raises:
        UserError: no tokenizer there, or one that does not say what ends a document.
    """

    def __init__(self, model: Path, decode_errors: DecodeErrors = DecodeErrors.STRICT) -> None:
        self._backend, self._sha256 = _load_backend(model)
        self._backend.no_truncation()
        self._backend.no_padding()
        folder = model if model.is_dir() else model.parent
        self.eod = _end_of_document(folder, model, self._backend)
        """The tokenizer's `eos_token`."""
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id, added tokens included."""
        self._decode_errors = decode_errors

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """See `Tokenizer`; the content of the tokenizer's file counts, not where it lies."""
        return {
            "class": TokenizerType.HUGGING_FACE.value,
            "sha256": self._sha256,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
        }

    def tokenize(self, text: str | bytes) -> TokenIds:
        """See `Tokenizer`; bytes are decoded under the error policy."""
        if isinstance(text, str):
            text = text.encode("utf-8", "surrogatepass")
        decoded = text.decode("utf-8", self._decode_errors.value)
        return np.array(self._backend.encode(decoded, add_special_tokens=False).ids, dtype=np.int64)

    def detokenize(self, ids: Sequence[int] | TokenIds) -> str:
        """See `Tokenizer`."""
        return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer: what the flags say, small enough to send to a worker process."""

    type: TokenizerType
    model: str | None = None
    vocab_size: int | None = None
    decode_errors: DecodeErrors = DecodeErrors.STRICT

    def build(self) -> Tokenizer:
        """Makes the tokenizer.

        Raises:
            UserError: a flag is missing or contradicts the type, or there is no such tokenizer.
        """
        if self.type is TokenizerType.HUGGING_FACE:
            if self.model is None:
                raise UserError(
                    "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: "
                    "a tokenizer.json or a folder that holds one"
                )
            return HuggingFaceTokenizer(Path(self.model), self.decode_errors)
        if self.model is not None:
            raise UserError(
                f"--tokenizer-model {self.model}: {self.type.value} is made of no file; "
                "leave it out or use --tokenizer-type HuggingFaceTokenizer"
            )
        if self.type is TokenizerType.BYTE:
            return ByteTokenizer()
        if self.vocab_size is None or self.vocab_size < 1:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size, a positive integer")
        return NullTokenizer(self.vocab_size)


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Returns the size of the embedding: the vocabulary, rounded up as Megatron-LM does.

    Args:
        divisible_by: `--make-vocab-size-divisible-by`.
    """
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def _load_backend(model: Path) -> tuple[TokenizersBackend, str]:
    """Returns the tokenizer and the SHA-256 of what it was made of."""
    path = model / "tokenizer.json" if model.is_dir() else model
    if not model.exists():
        raise UserError(f"--tokenizer-model {model}: no such file or folder")
    if not path.exists():
        backend = _load_with_transformers(model)
        return backend, hashlib.sha256(backend.to_str().encode()).hexdigest()
    try:
        content = path.read_bytes()
        return TokenizersBackend.from_buffer(content), hashlib.sha256(content).hexdigest()
    except Exception as error:
        raise UserError(f"--tokenizer-model {path}: no HuggingFace tokenizer: {error}") from error


def _load_with_transformers(folder: Path) -> TokenizersBackend:
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            f"--tokenizer-model {folder}: no tokenizer.json there; save the tokenizer in its fast "
            "form, or install transformers to read other forms"
        )
    from transformers import AutoTokenizer  # noqa: PLC0415  (optional and slow to import)

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_fast=True
        )
        return TokenizersBackend.from_str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise UserError(f"--tokenizer-model {folder}: no tokenizer there: {error}") from error


def _end_of_document(folder: Path, model: Path, backend: TokenizersBackend) -> int:
    """Returns the id of the `eos_token` that the files beside the tokenizer name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _named_end_token(folder / name)
        if token is None:
            continue
        identifier = backend.token_to_id(token)
        if identifier is None:
            raise UserError(f"{folder / name}: eos_token {token!r} is no token of {model}")
        return int(identifier)
    known = [backend.token_to_id(token) for token in _KNOWN_END_TOKENS]
    for identifier in known:
        if identifier is not None:
            return int(identifier)
    raise UserError(
        f"--tokenizer-model {model}: no token that ends a document; name it as eos_token in "
        f"{folder / 'tokenizer_config.json'}"
    )


def _named_end_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text("utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a JSON object: {error}") from error
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
