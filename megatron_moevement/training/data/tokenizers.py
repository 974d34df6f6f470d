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
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron_moevement.errors import UserError

TokenIds = npt.NDArray[np.integer[Any]]
"""One document's token ids, of any integer type."""

_END_OF_TEXT = "<|endoftext|>"
_KNOWN_END_TOKENS = (_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class TokenizerType(Enum):
    """Values of `--tokenizer-type`; all but the ByteTokenizer as in Megatron-LM."""

    BYTE = "ByteTokenizer"
    HUGGING_FACE = "HuggingFaceTokenizer"
    GPT2_BPE = "GPT2BPETokenizer"
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


class BackedTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        kind: TokenizerType,
        backend: TokenizersBackend,
        sha256: str,
        *,
        eod: int,
        decode_errors: DecodeErrors,
    ) -> None:
        """Takes one that is loaded.

        Args:
            sha256: of the content that it was made of.
        """
        backend.no_truncation()
        backend.no_padding()
        self._kind, self._backend, self._sha256 = kind, backend, sha256
        self.eod = eod
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id, added tokens included."""
        self._decode_errors = decode_errors

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """See `Tokenizer`; the content of the tokenizer's files counts, not where they lie."""
        return {
            "class": self._kind.value,
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


class HuggingFaceTokenizer(BackedTokenizer):
    """A HuggingFace tokenizer from a `tokenizer.json`, or a folder that holds one.

    A folder without `tokenizer.json` is loaded by `transformers`, where that is installed. Nothing
    is ever downloaded, no code of the folder is run. The tokenizer's `eos_token` ends a document.

    Raises:
        UserError: no tokenizer there, or one that does not say what ends a document.
    """

    def __init__(self, model: Path, decode_errors: DecodeErrors = DecodeErrors.STRICT) -> None:
        backend, sha256 = _load_backend(model)
        folder = model if model.is_dir() else model.parent
        eod = _end_of_document(folder, model, backend)
        kind = TokenizerType.HUGGING_FACE
        super().__init__(kind, backend, sha256, eod=eod, decode_errors=decode_errors)


class BytePairTokenizer(BackedTokenizer):
    """GPT-2's pairs of bytes, from the two files that Megatron-LM has them in.

    Raises:
        UserError: no such files, or no `<|endoftext|>` among the ids.
    """

    def __init__(
        self, vocab: Path, merges: Path, decode_errors: DecodeErrors = DecodeErrors.STRICT
    ) -> None:
        content = hashlib.sha256()
        for name, path in (("vocab", vocab), ("merge", merges)):
            try:
                content.update(path.read_bytes())
            except OSError as error:
                raise UserError(f"--{name}-file {path}: {error.strerror}") from error
        try:
            backend = TokenizersBackend(BPE.from_file(str(vocab), str(merges)))
        except Exception as error:
            raise UserError(
                f"--vocab-file {vocab} and --merge-file {merges}: no pairs of bytes: {error}"
            ) from error
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        backend.decoder = ByteLevelDecoder()
        eod = backend.token_to_id(_END_OF_TEXT)
        if eod is None:
            raise UserError(f"--vocab-file {vocab} has no {_END_OF_TEXT}, which ends a document")
        kind, sha256 = TokenizerType.GPT2_BPE, content.hexdigest()
        super().__init__(kind, backend, sha256, eod=int(eod), decode_errors=decode_errors)


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer: what the flags say, small enough to send to a worker process."""

    type: TokenizerType
    model: str | None = None
    vocab_size: int | None = None
    decode_errors: DecodeErrors = DecodeErrors.STRICT
    vocab_file: str | None = None
    merge_file: str | None = None

    def build(self) -> Tokenizer:
        """Makes the tokenizer.

        Raises:
            UserError: a flag is missing or contradicts the type, or there is no such tokenizer.
        """
        if self.type is TokenizerType.GPT2_BPE:
            self._check_unused("--tokenizer-model", self.model)
            if self.vocab_file is None or self.merge_file is None:
                raise UserError(
                    f"--tokenizer-type {self.type.value} needs --vocab-file and --merge-file"
                )
            vocab, merges = Path(self.vocab_file), Path(self.merge_file)
            return BytePairTokenizer(vocab, merges, self.decode_errors)
        self._check_unused("--vocab-file", self.vocab_file)
        self._check_unused("--merge-file", self.merge_file)
        if self.type is TokenizerType.HUGGING_FACE:
            if self.model is None:
                raise UserError(
                    "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: "
                    "a tokenizer.json or a folder that holds one"
                )
            return HuggingFaceTokenizer(Path(self.model), self.decode_errors)
        self._check_unused("--tokenizer-model", self.model)
        if self.type is TokenizerType.BYTE:
            return ByteTokenizer()
        if self.vocab_size is None or self.vocab_size < 1:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size, a positive integer")
        return NullTokenizer(self.vocab_size)

    def _check_unused(self, option: str, path: str | None) -> None:
        if path is not None:
            raise UserError(
                f"{option} {path}: {self.type.value} is not made of it; leave it out or give "
                f"--tokenizer-type {_MADE_OF[option].value}"
            )


_MADE_OF = {
    "--tokenizer-model": TokenizerType.HUGGING_FACE,
    "--vocab-file": TokenizerType.GPT2_BPE,
    "--merge-file": TokenizerType.GPT2_BPE,
}


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
