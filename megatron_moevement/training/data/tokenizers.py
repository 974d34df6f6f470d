# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: what a tokenizer is, and the two that are made of no file.

Light on purpose (no torch): the worker processes of `moevement data prepare` import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.integer[Any]]
"""One document's token ids, of any integer type."""


class TokenizerType(Enum):
    """Values of `--tokenizer-type`; all but the ByteTokenizer as in Megatron-LM."""

    BYTE = "ByteTokenizer"
    HUGGING_FACE = "HuggingFaceTokenizer"
    GPT2_BPE = "GPT2BPETokenizer"
    SENTENCE_PIECE = "SentencePieceTokenizer"
    GPT_SENTENCE_PIECE = "GPTSentencePieceTokenizer"
    LLAMA_2 = "Llama2Tokenizer"
    TIKTOKEN = "TikTokenizer"
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


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Returns the size of the embedding: the vocabulary, rounded up as Megatron-LM does.

    Args:
        divisible_by: `--make-vocab-size-divisible-by`.
    """
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
