# SPDX-License-Identifier: Apache-2.0
"""Small data sets for the tests of the data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_moevement.integrations.megatron.indexed import DocumentWriter
from megatron_moevement.settings.flags import add_flags
from megatron_moevement.training.data.arguments import DataConfig, DataFlags

VOCAB_SIZE = 1000


@pytest.fixture
def write_documents(tmp_path: Path) -> Callable[..., str]:
    """Writes a data set in which every token of document i is `first + i`; returns its prefix."""

    def write(name: str, num_documents: int = 120, first: int = 0, tokens: int = 40) -> str:
        rng = np.random.default_rng(first)
        writer = DocumentWriter(tmp_path / name, VOCAB_SIZE)
        for number in range(num_documents):
            length = int(rng.integers(tokens // 2, 2 * tokens))
            writer.add(np.full(length, first + number), [length])
        writer.finish()
        return str(tmp_path / name)

    return write


@pytest.fixture
def configure() -> Callable[..., DataConfig]:
    """Makes the configuration of a command line; NullTokenizer and 16 tokens unless said."""

    def make(*words: str) -> DataConfig:
        parser = argparse.ArgumentParser()
        add_flags(parser, "data", DataFlags)
        defaults = ("--seq-length", "16", "--tokenizer-type", "NullTokenizer")
        if "--tokenizer-type" not in words:
            defaults += ("--vocab-size", str(VOCAB_SIZE))
        return DataConfig.from_args(parser.parse_args([*defaults, *words]))

    return make
