# SPDX-License-Identifier: Apache-2.0
"""Random text to train on: no two samples of it are the same."""

from __future__ import annotations

from pathlib import Path
from random import Random

from megatron_moevement.training.data.documents import Search
from megatron_moevement.training.data.prepare import Preparation, prepare
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import TokenizerType


def prepare_random_text(folder: Path) -> Path:
    """Writes and prepares text in an empty folder; returns the prefix of the data."""
    random = Random(0)  # noqa: S311  (reproducible, not secret)
    for number in range(100):
        words = bytes(random.choices(range(97, 123), k=random.randint(50, 150)))
        (folder / f"{number:03}.txt").write_bytes(words)
    prefix, byte_tokenizer = folder / "text", TokenizerSpec(TokenizerType.BYTE)
    prepare(
        Preparation((folder,), str(prefix), byte_tokenizer, Search(("*.txt",))), lambda *_: None
    )
    return prefix


def data_flags(prefix: Path) -> tuple[str, ...]:
    """Returns the flags of a job that trains on prepared text."""
    return f"--data-path={prefix}", "--tokenizer-type=ByteTokenizer", "--split=90,5,5"
