# SPDX-License-Identifier: Apache-2.0
"""Launch scripts of others: flags of 46 real ones parse, or are refused for named features."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megatron_moevement.errors import UserError
from megatron_moevement.settings import architecture
from megatron_moevement.training.arguments import build_parser, parse
from megatron_moevement.training.data import arguments as data_arguments
from megatron_moevement.training.megatron_flags import FEATURES
from megatron_moevement.training.refusals import resolve
from megatron_moevement.training.reporting import arguments as reporting_arguments
from tests.harness.recipes import RECIPES, words_of
from tests.harness.sentence_piece import train_sentence_piece

PAGE = Path(__file__).parents[2] / "docs" / "use" / "megatron_scripts.md"
SETTINGS = build_parser().flags
SENTENCE_PIECE = {"SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"}
FILES = ("--tokenizer-model", "--vocab-file", "--merge-file")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """What recipes need of a machine: files where they say, and libraries of a GPU's image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(architecture, "_has_transformer_engine", lambda: True)
    monkeypatch.setattr(reporting_arguments, "_check_wandb", lambda config: None)
    monkeypatch.setattr(data_arguments, "check_prefix", lambda prefix: None)
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}

    def write(words):
        paths = [words[place + 1] for place, word in enumerate(words) if word in FILES]
        for path in paths:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if path.endswith("merges.txt"):
                Path(path).write_text("#version: 0.2\na b\n")
            elif path.endswith("vocab.json"):
                Path(path).write_text(json.dumps(vocabulary))
            elif SENTENCE_PIECE.intersection(words):
                Path(path).write_bytes(train_sentence_piece())
            else:
                Path(path).mkdir(exist_ok=True) if "." not in path else None
                file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
                Tokenizer(models.WordLevel(vocabulary)).save(str(file))

    return write


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_parses_or_is_refused_for_what_it_asks_for(name, machine):
    words, world_size = words_of(name)
    machine(words)
    refused = resolve(words, SETTINGS).refused
    assert set(refused) <= FEATURES.keys()
    if not refused:
        arguments = parse(words, world_size)
        assert arguments.moe.num_experts is not None
        return
    with pytest.raises(UserError) as raised:
        parse(words, world_size)
    for feature, flags in refused.items():
        assert f"{feature} ({', '.join(flags)}): {FEATURES[feature].reason}" in str(raised.value)
    assert "unknown" not in str(raised.value)


def asked_for():
    """Returns for each recipe the features that it asks for and that are not covered."""
    return {name: resolve(words_of(name)[0], SETTINGS).refused for name in RECIPES}


def test_the_page_lists_what_is_refused_and_how_often():
    asked = asked_for()
    counts = Counter(feature for refused in asked.values() for feature in refused)
    rows = [f"| {name} | {counts[name]} | {feature.reason} |" for name, feature in FEATURES.items()]
    page = PAGE.read_text()
    assert "\n".join(rows) in page
    parsed = sum(not refused for refused in asked.values())
    assert f"{parsed} of {len(RECIPES)} parse" in page
