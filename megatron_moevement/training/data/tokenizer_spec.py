# SPDX-License-Identifier: Apache-2.0
"""Which tokenizer: what the flags say, small enough to send to a worker process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.tiktoken import DEFAULT_SPLITTING, Splitting
from megatron_moevement.training.data.file_tokenizers import (
    BytePairTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from megatron_moevement.training.data.tiktoken_files import TikTokenizer
from megatron_moevement.training.data.tokenizers import (
    ByteTokenizer,
    DecodeErrors,
    NullTokenizer,
    Tokenizer,
    TokenizerType,
)

_OF_A_MODEL: Mapping[TokenizerType, Callable[[Path, DecodeErrors], Tokenizer]] = {
    TokenizerType.HUGGING_FACE: HuggingFaceTokenizer,
    TokenizerType.SENTENCE_PIECE: SentencePieceTokenizer,
    TokenizerType.GPT_SENTENCE_PIECE: SentencePieceTokenizer,
    TokenizerType.LLAMA_2: SentencePieceTokenizer,
}
"""What is made of `--tokenizer-model` alone."""

_MODELS: Mapping[TokenizerType, str] = {
    **dict.fromkeys(_OF_A_MODEL, "a model of SentencePiece"),
    TokenizerType.HUGGING_FACE: "a tokenizer.json or a folder that holds one",
    TokenizerType.TIKTOKEN: "a file .json of tokens",
}


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """What makes a tokenizer."""

    type: TokenizerType
    model: str | None = None
    vocab_size: int | None = None
    decode_errors: DecodeErrors = DecodeErrors.STRICT
    vocab_file: str | None = None
    merge_file: str | None = None
    splitting: Splitting = DEFAULT_SPLITTING

    def build(self) -> Tokenizer:
        """Makes the tokenizer.

        Raises:
            UserError: a flag is missing or contradicts the type, or there is no such tokenizer.
        """
        if self.type is not TokenizerType.TIKTOKEN and self.splitting != DEFAULT_SPLITTING:
            raise UserError(
                f"--tiktoken-...: {self.type.value} is not made of it; leave it out or give "
                f"--tokenizer-type {TokenizerType.TIKTOKEN.value}"
            )
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
        if self.type in _MODELS:
            return self._of_a_model()
        self._check_unused("--tokenizer-model", self.model)
        if self.type is TokenizerType.BYTE:
            return ByteTokenizer()
        if self.vocab_size is None or self.vocab_size < 1:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size, a positive integer")
        return NullTokenizer(self.vocab_size)

    def _of_a_model(self) -> Tokenizer:
        if self.model is None:
            raise UserError(
                f"--tokenizer-type {self.type.value} needs --tokenizer-model: {_MODELS[self.type]}"
            )
        model = Path(self.model)
        if self.type is TokenizerType.TIKTOKEN:
            return TikTokenizer(
                model, self.decode_errors, splitting=self.splitting, vocab_size=self.vocab_size
            )
        return _OF_A_MODEL[self.type](model, self.decode_errors)

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
