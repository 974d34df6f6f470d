# SPDX-License-Identifier: Apache-2.0
"""The data flags, under Megatron-LM's names, and the checked configuration made of them.

Imports neither torch nor Megatron-Core: arguments are checked before a backend is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Self

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.tiktoken import (
    DEFAULT_SPLITTING,
    PATTERNS,
    SPECIAL_TOKENS,
    Splitting,
)
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.flags import flag, read_flags
from megatron_moevement.training.data.manifest import manifest_path, read_manifest
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import Tokenizer, TokenizerType, padded_vocab_size

DEFAULT_SPLIT = "969,30,1"

_BLEND_HELP = "PREFIX of .bin and .idx, or several, or WEIGHT PREFIX pairs"


@dataclasses.dataclass(frozen=True)
class DataFlags:
    """The flags of the data, as given."""

    data_path: tuple[str, ...] | None = flag(
        None, f"data of all three splits: {_BLEND_HELP}", nargs="*"
    )
    train_data_path: tuple[str, ...] | None = flag(None, f"training data: {_BLEND_HELP}", nargs="*")
    valid_data_path: tuple[str, ...] | None = flag(
        None, f"validation data: {_BLEND_HELP}", nargs="*"
    )
    test_data_path: tuple[str, ...] | None = flag(None, f"test data: {_BLEND_HELP}", nargs="*")
    split: str | None = flag(
        None, f"shares of --data-path for train, validation, test (default: {DEFAULT_SPLIT})"
    )
    data_cache_path: str | None = flag(
        None, "folder for index files (default: a folder beside the data)"
    )
    mock_data: bool = flag(False, "artificial data")
    seq_length: int | None = flag(None, "tokens per sample")
    tokenizer_type: TokenizerType | None = flag(None, "tokenizer of the data")
    tokenizer_model: str | None = flag(
        None, "tokenizer.json, a folder that holds one, a model of SentencePiece, or tokens (.json)"
    )
    tiktoken_pattern: str = flag(
        DEFAULT_SPLITTING.pattern, "how the TikTokenizer cuts text", choices=PATTERNS
    )
    tiktoken_num_special_tokens: int = flag(
        DEFAULT_SPLITTING.num_special, "ids of the TikTokenizer before those of its file"
    )
    tiktoken_special_tokens: tuple[str, ...] | None = flag(
        None,
        f"special tokens of the TikTokenizer (default: {' '.join(SPECIAL_TOKENS)})",
        nargs="+",
        metavar="TOKEN",
    )
    vocab_file: str | None = flag(None, "vocab.json of the GPT2BPETokenizer", metavar="FILE")
    merge_file: str | None = flag(None, "merges.txt of the GPT2BPETokenizer", metavar="FILE")
    vocab_size: int | None = flag(None, "size of the vocabulary before end-of-document and padding")
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary to a multiple of this x TP")
    reset_position_ids: bool = flag(False, "restart positions after an end-of-document")
    reset_attention_mask: bool = flag(False, "refused: attention is causal over the whole sample")
    eod_mask_loss: bool = flag(False, "no loss for what follows an end-of-document")
    mmap_bin_files: bool = flag(True, "read .bin files instead of mapping them")
    num_workers: int = flag(2, "threads that fetch micro-batches ahead; 0: none")
    num_dataset_builder_threads: int = flag(1, "threads that build the data sets of a blend")


@dataclasses.dataclass(frozen=True)
class Blend:
    """Data sets and their weights; without weights each counts by its number of samples."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Mock:
    """Artificial data."""


@dataclasses.dataclass(frozen=True)
class OneBlend:
    """One blend whose documents are split into train, validation and test, in this order."""

    blend: Blend
    shares: tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class BlendPerSplit:
    """A blend for each split; None: that split has no data."""

    train: Blend
    valid: Blend | None
    test: Blend | None


DataSource = Mock | OneBlend | BlendPerSplit


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What the data flags say, checked; `tokenizer` is loaded, `flags` are as given."""

    source: DataSource
    tokenizer: Tokenizer
    vocab_size: int
    seq_length: int
    flags: DataFlags

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Makes the configuration of parsed arguments; any rank, before Megatron is imported.

        Raises:
            UserError: a value is missing, wrong or contradicts another; a file is missing; the
                data was made with another tokenizer or holds ids that the vocabulary lacks.
        """
        flags, checks = read_flags(DataFlags, args), Checks()
        checks.passes(_check_numbers, flags)
        if flags.reset_attention_mask:
            checks.refuse(
                "--reset-attention-mask: the model computes causal attention over the whole "
                "sample, with no mask between documents; leave the flag out"
            )
        source = checks.result(_read_source, flags)
        tokenizer = checks.result(_read_tokenizer, flags)
        for prefix in () if source is None else data_prefixes(source):
            if checks.passes(check_prefix, prefix) and tokenizer is not None:
                checks.passes(check_tokenizer, prefix, tokenizer)
        checks.end()
        assert source is not None
        assert tokenizer is not None
        vocab_size = max(tokenizer.vocab_size, flags.vocab_size or 0)
        return cls(
            source=source,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            seq_length=int(flags.seq_length or 0),
            flags=flags,
        )

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Returns the number of rows of the embedding."""
        return padded_vocab_size(
            self.vocab_size, self.flags.make_vocab_size_divisible_by, tensor_parallel_size
        )


def check_positions(config: DataConfig, position_embedding_type: str) -> None:
    """Checks that the model reads the position ids that the data sets out to give it.

    Raises:
        UserError: Megatron-Core ignores position ids with this kind of positions.
    """
    if config.flags.reset_position_ids and position_embedding_type != "learned_absolute":
        raise UserError(
            f"--reset-position-ids has no effect with --position-embedding-type "
            f"{position_embedding_type}, which reads no position ids; leave it out or use "
            "learned_absolute"
        )


def parse_blend(flag_name: str, words: Sequence[str]) -> Blend:
    """Reads the values of a `--*data-path` flag.

    Raises:
        UserError: weights and prefixes do not come in pairs, or a weight is not positive.
    """
    words = [word.strip() for word in words]
    numbers = [_as_float(word) is not None for word in words]
    if not any(numbers):
        return Blend(tuple(words))
    if len(words) % 2 or numbers != [True, False] * (len(words) // 2):
        raise UserError(
            f"{flag_name} {' '.join(words)}: give prefixes alone, or pairs of a number (the "
            "weight) and a prefix"
        )
    weights = tuple(float(word) for word in words[::2])
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"{flag_name} {' '.join(words)}: weights must be positive numbers")
    return Blend(tuple(words[1::2]), weights)


def parse_split(text: str) -> tuple[float, float, float]:
    """Reads `--split`; shares need not sum to one, as in Megatron-LM they are normalised.

    Returns:
        The shares of train, validation and test, as given.

    Raises:
        UserError: not one to three shares, one is negative, or none is left for training.
    """
    shares = [_as_float(word) for word in text.split(",")]
    good = [share for share in shares if share is not None and math.isfinite(share) and share >= 0]
    if len(good) != len(shares) or not 1 <= len(good) <= 3:
        raise UserError(
            f"--split {text}: give up to three non-negative numbers for train, validation and "
            f"test, such as {DEFAULT_SPLIT}"
        )
    train, valid, test = (*good, 0.0, 0.0)[:3]
    if train == 0:
        raise UserError(f"--split {text}: the first share, that of training, must be positive")
    return train, valid, test


def data_prefixes(source: DataSource) -> tuple[str, ...]:
    """Returns every prefix of a source, each once, in order."""
    match source:
        case Mock():
            blends: tuple[Blend | None, ...] = ()
        case OneBlend(blend, _):
            blends = (blend,)
        case BlendPerSplit(train, valid, test):
            blends = (train, valid, test)
    return tuple(dict.fromkeys(p for blend in blends if blend for p in blend.prefixes))


def check_prefix(prefix: str) -> None:
    """Checks that both files of a data set can be read.

    Raises:
        UserError: one is missing or unreadable.
    """
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            hint = " (give the prefix, without .bin or .idx)" if os.path.isfile(prefix) else ""
            raise UserError(
                f"data {prefix}: {path} is missing{hint}; make it with `moevement data prepare`"
            )
        if not os.access(path, os.R_OK):
            raise UserError(f"data {prefix}: {path} is not readable; mend its permissions")


def check_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    """Checks a tokenizer against the manifest of a data set, where there is one.

    The NullTokenizer fits any data whose ids it has.

    Raises:
        UserError: the data was made with another tokenizer, or has ids outside the vocabulary.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    given = dict(tokenizer.unique_identifiers)
    if given["class"] != TokenizerType.NULL.value and manifest.tokenizer != given:
        raise UserError(
            f"data {prefix} was made with {_describe(manifest.tokenizer)}, the flags name "
            f"{_describe(given)} (see {manifest_path(prefix)}); name that tokenizer or prepare the "
            "data again"
        )
    if manifest.max_token_id >= tokenizer.vocab_size:
        raise UserError(
            f"data {prefix} holds the id {manifest.max_token_id}, the vocabulary of "
            f"{given['class']} ends at {tokenizer.vocab_size - 1}; name the tokenizer of the data "
            "or a larger --vocab-size"
        )


def _read_source(flags: DataFlags) -> DataSource:
    per_split = {
        "--train-data-path": flags.train_data_path,
        "--valid-data-path": flags.valid_data_path,
        "--test-data-path": flags.test_data_path,
    }
    given = {"--data-path": flags.data_path, **per_split}
    names = [name for name, words in given.items() if words]
    if flags.mock_data:
        if names:
            raise UserError(f"--mock-data and {names[0]} exclude each other; leave one out")
        return Mock()
    if not names:
        raise UserError("no data: give --data-path PREFIX, or --mock-data for artificial data")
    if flags.data_path:
        if len(names) > 1:
            raise UserError(f"--data-path and {names[1]} exclude each other; leave one out")
        shares = parse_split(flags.split or DEFAULT_SPLIT)
        return OneBlend(parse_blend("--data-path", flags.data_path), shares)
    if flags.split is not None:
        raise UserError(f"--split belongs to --data-path, not to {names[0]}; leave it out")
    if not flags.train_data_path:
        raise UserError(f"{names[0]} without --train-data-path: give data to train on, too")
    train, valid, test = (
        parse_blend(name, words) if words else None for name, words in per_split.items()
    )
    assert train is not None
    return BlendPerSplit(train, valid, test)


def _read_tokenizer(flags: DataFlags) -> Tokenizer:
    kind = flags.tokenizer_type
    if kind is None and flags.merge_file is not None:
        kind = TokenizerType.GPT2_BPE  # no other is made of merges
    if kind is None:
        names = ", ".join(member.value for member in TokenizerType)
        raise UserError(f"--tokenizer-type is missing: one of {names}")
    spec = TokenizerSpec(
        kind,
        flags.tokenizer_model,
        flags.vocab_size,
        vocab_file=flags.vocab_file,
        merge_file=flags.merge_file,
        splitting=Splitting(
            flags.tiktoken_pattern,
            flags.tiktoken_num_special_tokens,
            flags.tiktoken_special_tokens,
        ),
    )
    tokenizer = spec.build()
    needed = tokenizer.vocab_size - (kind is TokenizerType.NULL)
    if flags.vocab_size is not None and flags.vocab_size < needed:
        raise UserError(
            f"--vocab-size {flags.vocab_size} is smaller than the {needed} ids of "
            f"{kind.value}; leave it out"
        )
    return tokenizer


def _check_numbers(flags: DataFlags) -> None:
    checks = Checks()
    for name in ("seq_length", "make_vocab_size_divisible_by", "num_dataset_builder_threads"):
        value = getattr(flags, name)
        if value is None or value < 1:
            checks.refuse(f"--{name.replace('_', '-')} must be a positive integer")
    if flags.num_workers < 0:
        checks.refuse(f"--num-workers {flags.num_workers} must be 0 or more")
    checks.end()


def _as_float(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _describe(identifiers: dict[str, object]) -> str:
    digest = str(identifiers.get("sha256", ""))[:12]
    known = f", sha256 {digest}..." if digest else ""
    return f"{identifiers.get('class')} ({identifiers.get('vocab_size')} ids{known})"
