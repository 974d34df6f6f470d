# SPDX-License-Identifier: Apache-2.0
"""What a run is: the content of files counts, under whatever path they lie."""

import dataclasses

import pytest
from tokenizers import Tokenizer, models

from megatron_moevement.training.arguments import parse
from megatron_moevement.training.data import content
from megatron_moevement.training.deciding import DECIDING
from megatron_moevement.training.run_identity import checkpoint_mark, given, identify
from tests.harness.random_text import prepare_random_text
from tests.harness.tiny_job import TINY, tiny_arguments


def test_two_tokenizer_files_of_one_size_make_two_runs(tmp_path):
    path = tmp_path / "tokenizer.json"
    flags = ("--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={tmp_path}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eod>"}')
    found = []
    for word in ("a", "b"):
        Tokenizer(models.WordLevel({"<eod>": 0, word: 1}, unk_token="<eod>")).save(str(path))
        found.append((path.stat().st_size, identify(tiny_arguments(*flags))))
    (size_bytes, one), (other_bytes, other) = found
    assert size_bytes == other_bytes
    assert one.digest != other.digest
    assert [name for name in one.deciding if one.deciding[name] != other.deciding[name]] == [
        "tokenizer"
    ]


@pytest.mark.parametrize("place", [0, 50, -1])
def test_tokens_that_are_rewritten_in_place_make_another_run(tmp_path, place):
    prefix = prepare_random_text(tmp_path)
    before = content.tokens_digest(str(prefix))
    tokens = bytearray(prefix.with_suffix(".bin").read_bytes())
    tokens[place] ^= 1
    prefix.with_suffix(".bin").write_bytes(tokens)
    assert content.tokens_digest(str(prefix)) != before


def test_a_flag_that_came_later_is_part_of_the_name_only_where_it_says_something():
    """Runs of before it go on."""
    found = given(tiny_arguments())
    later = {name for deciding in DECIDING.values() for name in deciding.later}
    assert {f"--{name.replace('_', '-')}" for name in later}.isdisjoint(found)
    one, other = tiny_arguments("--rotary-interleaved"), tiny_arguments("--no-rope-fusion")
    assert given(one) == found | {"--rotary-interleaved": True}
    assert given(other).keys() == found.keys()


def test_a_run_that_is_as_long_in_samples_is_another_run():
    """Its schedule is one of samples."""
    flags = [flag for flag in TINY if not flag.startswith("--train-iters")]
    in_samples = parse([*flags, "--train-samples=96", "--lr-decay-style=cosine"], 1)
    in_iterations = tiny_arguments("--lr-decay-style=cosine")
    assert in_samples.run.train_iters == in_iterations.run.train_iters == 8
    one, other = given(in_samples), given(in_iterations)
    assert {name for name in one if one[name] != other[name]} == {"steps of the learning rate"}


def test_the_portable_fingerprint_is_that_of_the_run_on_any_machine():
    one, other = identify(tiny_arguments()), identify(tiny_arguments("--lr=0.003"))
    assert one.portable_fingerprint != other.portable_fingerprint
    for name in ("device", "torch"):
        moved = dataclasses.replace(one, deciding={**one.deciding, name: "another"})
        assert moved.fingerprint != one.fingerprint
        assert moved.portable_fingerprint == one.portable_fingerprint
    for changed in ({"deciding": {**one.deciding, "ranks": "9"}}, {"layout": {"--w": "9"}}):
        assert dataclasses.replace(one, **changed).portable_fingerprint != one.portable_fingerprint


def test_a_run_goes_on_from_its_own_checkpoint_on_any_machine():
    one = identify(tiny_arguments())
    moved = dataclasses.replace(one, deciding={**one.deciding, "device": "another"})
    assert checkpoint_mark(moved) == checkpoint_mark(one)
    assert checkpoint_mark(identify(tiny_arguments("--lr=0.003"))) != checkpoint_mark(one)
