# SPDX-License-Identifier: Apache-2.0
"""Tokenizers made of local files; nothing is ever downloaded.

Light on purpose (no torch): the worker processes of `moevement data prepare` import it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as TokenizersBackend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron_moevement.errors import UserError
from megatron_moevement.training.data.tokenizers import DecodeErrors, TokenIds, TokenizerType

_END_OF_TEXT = "<|endoftext|>"
_KNOWN_END_TOKENS = (_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class FileTokenizer(ABC):
    """A tokenizer made of files; their content counts, not where they lie."""

    def __init__(
        self,
        kind: TokenizerType,
        sha256: str,
        *,
        vocab_size: int,
        eod: int,
        decode_errors: DecodeErrors,
    ) -> None:
        """Describes one that is loaded.

        Args:
            sha256: of the content that it was made of.
        """
        self._kind, self._sha256, self._decode_errors = kind, sha256, decode_errors
        self.vocab_size, self.eod = vocab_size, eod

    @property
    def unique_identifiers(self) -> Mapping[str, object]:
        """See `Tokenizer`."""
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
        return np.array(self._ids(decoded), dtype=np.int64)

    def detokenize(self, ids: Sequence[int] | TokenIds) -> str:
        """See `Tokenizer`."""
        return self._text(np.asarray(ids).tolist())

    @abstractmethod
    def _ids(self, text: str) -> Sequence[int]:
        """Returns the ids of a text, without special tokens."""

    @abstractmethod
    def _text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""


class BackedTokenizer(FileTokenizer):
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
        self._backend = backend
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        super().__init__(kind, sha256, vocab_size=size, eod=eod, decode_errors=decode_errors)

    def _ids(self, text: str) -> Sequence[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


class HuggingFaceTokenizer(BackedTokenizer):
    """A HuggingFace tokenizer from a `tokenizer.json`, or a folder that holds one.

    A name on the hub is looked up in the cache of this machine, where `hf download` puts it.
    A folder without `tokenizer.json` is loaded by `transformers`, where that is installed. Nothing
    is ever downloaded, no code of the folder is run. The tokenizer's `eos_token` ends a document.

    Raises:
        UserError: no tokenizer there, or one that does not say what ends a document.
    """

    def __init__(self, model: Path, decode_errors: DecodeErrors = DecodeErrors.STRICT) -> None:
        model = _in_cache(model) if not model.exists() else model
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


class SentencePieceTokenizer(FileTokenizer):
    """A model of SentencePiece, which Megatron-Core's tokenizers of three names read alike.

    Its end of a sentence ends a document.

    Raises:
        UserError: no such model, or one without an end of a sentence.
    """

    def __init__(self, model: Path, decode_errors: DecodeErrors = DecodeErrors.STRICT) -> None:
        try:
            content = model.read_bytes()
        except OSError as error:
            raise UserError(f"--tokenizer-model {model}: {error.strerror}") from error
        try:
            self._processor = SentencePieceProcessor(model_proto=content)
        except Exception as error:
            raise UserError(f"--tokenizer-model {model}: no model of SentencePiece") from error
        eod, size = self._processor.eos_id(), self._processor.get_piece_size()
        if eod < 0:
            raise UserError(f"--tokenizer-model {model} has no end of a sentence")
        kind, sha256 = TokenizerType.SENTENCE_PIECE, hashlib.sha256(content).hexdigest()
        super().__init__(kind, sha256, vocab_size=size, eod=eod, decode_errors=decode_errors)

    def _ids(self, text: str) -> Sequence[int]:
        return list(self._processor.encode_as_ids(text))

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode_ids(ids))


def _in_cache(name: Path) -> Path:
    """Returns the folder of the files of a name on the hub that were downloaded."""
    # Slow to import where a path is given.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(str(name), "tokenizer.json")
    except HFValidationError:
        raise UserError(f"--tokenizer-model {name}: no such file or folder") from None
    if not isinstance(found, str):
        raise UserError(
            f"--tokenizer-model {name}: no such file or folder, and nothing of that name in the "
            "cache of the Hugging Face hub; to have it there: "
            f"hf download {name} tokenizer.json tokenizer_config.json"
        )
    return Path(found).parent


def _load_backend(model: Path) -> tuple[TokenizersBackend, str]:
    """Returns the tokenizer and the SHA-256 of what it was made of."""
    path = model / "tokenizer.json" if model.is_dir() else model
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
