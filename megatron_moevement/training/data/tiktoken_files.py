# SPDX-License-Identifier: Apache-2.0
"""The TikTokenizer, made of a JSON file of tokens.

Light on purpose (no torch): the worker processes of `moevement data prepare` import it, and flags
are read before torch is. Megatron-Core is imported with the first text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.tiktoken import (
    DEFAULT_SPLITTING,
    DEFAULT_VOCABULARY,
    SPECIAL_TOKENS,
    Splitting,
    TiktokenText,
)
from megatron_moevement.training.data.file_tokenizers import FileTokenizer
from megatron_moevement.training.data.tokenizers import DecodeErrors, TokenizerType

_END = "</s>"
_BYTES = 256


class TikTokenizer(FileTokenizer):
    """tiktoken's pairs of bytes, as Megatron-Core reads them.

    `</s>` ends a document. A special token in a text has its own id, as in Megatron-Core.

    Raises:
        UserError: no such file, one of another form or too small, special tokens that contradict
            each other, or tiktoken is not installed.
    """

    def __init__(
        self,
        model: Path,
        decode_errors: DecodeErrors = DecodeErrors.STRICT,
        *,
        splitting: Splitting = DEFAULT_SPLITTING,
        vocab_size: int | None = None,
    ) -> None:
        """Checks the file.

        Args:
            vocab_size: special tokens included; None: Megatron-Core's.
        """
        if importlib.util.find_spec("tiktoken") is None:
            raise UserError(
                "--tokenizer-type TikTokenizer: tiktoken is not installed; pip install tiktoken"
            )
        self._model, self._splitting = model, splitting
        size = DEFAULT_VOCABULARY if vocab_size is None else vocab_size
        _check_special(splitting, size)
        content = _read(model)
        _check_tokens(model, content, size - splitting.num_special, splitting.num_special)
        decides = (splitting.pattern, splitting.num_special, splitting.named)
        digest = hashlib.sha256(content)
        digest.update(json.dumps(decides).encode())
        super().__init__(
            TokenizerType.TIKTOKEN,
            digest.hexdigest(),
            vocab_size=size,
            eod=splitting.named.index(_END),
            decode_errors=decode_errors,
        )

    @functools.cached_property
    def _text_of(self) -> TiktokenText:
        return TiktokenText(self._model, self._splitting, self.vocab_size)

    def _ids(self, text: str) -> Sequence[int]:
        return self._text_of.ids(text)

    def _text(self, ids: Sequence[int]) -> str:
        return self._text_of.text(ids)


def _check_special(splitting: Splitting, vocab_size: int) -> None:
    named, number = splitting.named, splitting.num_special
    missing = [token for token in SPECIAL_TOKENS if token not in named]
    if missing:
        raise UserError(f"--tiktoken-special-tokens lacks {' '.join(missing)}")
    fillers = {f"<SPECIAL_{place}>" for place in range(len(named), number)}
    if len({*named}) < len(named) or fillers.intersection(named):
        raise UserError("--tiktoken-special-tokens has a token twice, or one that fills a place")
    if not len(named) <= number < vocab_size:
        raise UserError(
            f"--tiktoken-num-special-tokens {number} must be at least {len(named)}, the special "
            f"tokens that have a name, and below the size of the vocabulary, {vocab_size}"
        )


def _read(model: Path) -> bytes:
    if model.suffix != ".json":  # Megatron-Core takes no other
        raise UserError(f"--tokenizer-model {model}: the TikTokenizer is made of a file .json")
    try:
        return model.read_bytes()
    except OSError as error:
        raise UserError(f"--tokenizer-model {model}: {error.strerror}") from error


def _check_tokens(model: Path, content: bytes, wanted: int, num_special: int) -> None:
    try:
        tokens = [_token(place, entry) for place, entry in enumerate(json.loads(content)[:wanted])]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"--tokenizer-model {model}: no list of tokens, each with rank, token_bytes and "
            f"token_str, the single bytes first: {error}"
        ) from error
    if len(tokens) < wanted:
        raise UserError(
            f"--tokenizer-model {model} has {len(tokens)} tokens, {len(tokens) + num_special} with "
            f"special ones: give --vocab-size {len(tokens) + num_special}"
        )
    if len({*tokens}) < len(tokens):
        raise UserError(f"--tokenizer-model {model} has a token twice")


def _token(place: int, entry: dict[str, Any]) -> bytes:
    if entry.keys() != {"rank", "token_bytes", "token_str"} or entry["rank"] != place:
        raise ValueError(f"entry {place} is {str(entry)[:80]}")
    token = base64.b64decode(entry["token_bytes"])
    if place < _BYTES and token != bytes([place]):
        raise ValueError(f"entry {place} is no single byte")
    return token
