# SPDX-License-Identifier: Apache-2.0
"""The data flags: what they mean, and what is refused in one line."""

import argparse
from pathlib import Path

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.settings.flags import add_flags
from megatron_moevement.training.data.arguments import (
    Blend,
    BlendPerSplit,
    DataConfig,
    DataFlags,
    Mock,
    OneBlend,
    check_positions,
    parse_blend,
    parse_split,
)
from megatron_moevement.training.data.manifest import Manifest, Source, manifest_path
from megatron_moevement.training.data.tokenizers import ByteTokenizer


def test_data_path_is_split_as_megatron_does_by_default(write_documents, configure):
    prefix = write_documents("a")
    assert configure("--data-path", prefix).source == OneBlend(Blend((prefix,)), (969, 30, 1))


def test_weights_and_prefixes_alternate(write_documents, configure):
    a, b = write_documents("a"), write_documents("b")
    source = configure("--data-path", "30", a, "0.7e2", b, "--split", "9,1").source
    assert source == OneBlend(Blend((a, b), (30.0, 70.0)), (9, 1, 0))


def test_an_even_number_of_prefixes_needs_no_weights():
    assert parse_blend("--data-path", ["a", "b"]) == Blend(("a", "b"))


def test_each_split_may_have_data_of_its_own(write_documents, configure):
    a, b = write_documents("a"), write_documents("b")
    source = configure("--train-data-path", a, "--valid-data-path", "1", b).source
    assert source == BlendPerSplit(Blend((a,)), Blend((b,), (1.0,)), None)


def test_mock_data_ignores_the_split_as_megatron_does(configure):
    assert configure("--mock-data", "--split", "99,1,0").source == Mock()


def test_the_vocabulary_is_the_tokenizers_and_padded_for_tensor_parallelism(configure):
    config = configure("--mock-data", "--tokenizer-type", "ByteTokenizer")
    assert config.vocab_size == 257
    assert config.padded_vocab_size(1) == 384
    assert config.padded_vocab_size(4) == 512
    exact = configure(
        *("--mock-data", "--tokenizer-type", "ByteTokenizer"),
        *("--make-vocab-size-divisible-by", "1"),
    )
    assert exact.padded_vocab_size(1) == 257


def test_a_larger_vocabulary_may_be_asked_for(configure):
    config = configure("--mock-data", "--tokenizer-type", "ByteTokenizer", "--vocab-size", "600")
    assert config.vocab_size == 600


def test_a_null_tokenizer_adds_its_end_of_document_as_megatron_does(configure):
    config = configure("--mock-data")
    assert (config.tokenizer.vocab_size, config.tokenizer.eod) == (1001, 1000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no data"),
        (["--mock-data", "--data-path", "DATA"], "exclude each other"),
        (["--data-path", "DATA", "--train-data-path", "DATA"], "exclude each other"),
        (["--valid-data-path", "DATA"], "without --train-data-path"),
        (["--train-data-path", "DATA", "--split", "9,1"], "--split belongs to --data-path"),
        (["--data-path", "nowhere"], "nowhere.idx is missing"),
        (["--data-path", "DATA.bin"], "give the prefix, without .bin"),
        (["--data-path", "x1", "DATA", "1", "DATA"], "pairs of a number"),
        (["--data-path", "1", "DATA", "DATA"], "pairs of a number"),
        (["--data-path", "0", "DATA"], "weights must be positive"),
        (["--data-path", "nan", "DATA"], "weights must be positive"),
        (["--data-path", "DATA", "--split", "0,0,0"], "must be positive"),
        (["--data-path", "DATA", "--split", "9,-1,0"], "non-negative numbers"),
        (["--data-path", "DATA", "--split", "9,1,x"], "non-negative numbers"),
        (["--data-path", "DATA", "--split", "7,1,1,1"], "non-negative numbers"),
        (["--data-path", "DATA", "--split", "inf,1,1"], "non-negative numbers"),
        (["--mock-data", "--seq-length", "0"], "--seq-length must be"),
        (["--mock-data", "--num-workers", "-1"], "--num-workers -1"),
        (["--mock-data", "--num-dataset-builder-threads", "0"], "--num-dataset-builder-threads"),
        (["--mock-data", "--make-vocab-size-divisible-by", "0"], "divisible-by must be"),
        (["--mock-data", "--reset-attention-mask"], "causal attention over the whole sample"),
        (["--mock-data", "--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
        (["--mock-data", "--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
        (["--mock-data", "--tokenizer-model", "x"], "is not made of it"),
        (
            ["--mock-data", "--tokenizer-type", "ByteTokenizer", "--vocab-size", "256"],
            "smaller than the 257 ids",
        ),
        (
            [
                *("--mock-data", "--tokenizer-type", "HuggingFaceTokenizer"),
                *("--tokenizer-model", "nowhere"),
            ],
            "no such file",
        ),
    ],
)
def test_bad_flags_are_refused_in_one_line(words, message, write_documents, configure):
    prefix = write_documents("a")
    with pytest.raises(UserError, match=message) as refusal:
        configure(*(word.replace("DATA", prefix) for word in words))
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_must_be_named():
    parser = argparse.ArgumentParser()
    add_flags(parser, "data", DataFlags)
    with pytest.raises(UserError, match="--tokenizer-type is missing"):
        DataConfig.from_args(parser.parse_args(["--mock-data", "--seq-length", "8"]))


def write_manifest(prefix: str, max_token_id: int) -> None:
    manifest = Manifest(
        tokenizer=dict(ByteTokenizer().unique_identifiers),
        decode_errors="strict",
        append_eod=True,
        dtype="uint16",
        documents=1,
        empty_documents=0,
        tokens=1,
        max_token_id=max_token_id,
        unigram_entropy_nats=0.0,
        source=Source(1, 1, "0"),
    )
    manifest_path(prefix).write_text(manifest.to_json())


def test_data_of_another_tokenizer_is_refused(write_documents, configure, monkeypatch):
    prefix = write_documents("a")
    write_manifest(prefix, 256)
    configure("--data-path", prefix, "--tokenizer-type", "ByteTokenizer")
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 301)
    with pytest.raises(UserError, match=r"made with ByteTokenizer \(257 ids\)"):
        configure("--data-path", prefix, "--tokenizer-type", "ByteTokenizer")


def test_a_null_tokenizer_takes_any_data_whose_ids_it_has(write_documents, configure):
    prefix = write_documents("a")
    write_manifest(prefix, 256)
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size")
    configure("--data-path", prefix, *null, "256")
    with pytest.raises(UserError, match="holds the id 256, the vocabulary of NullTokenizer ends"):
        configure("--data-path", prefix, *null, "255")


@pytest.mark.parametrize("content", ["", "[]", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_damaged_manifest_is_refused(content, write_documents, configure):
    prefix = write_documents("a")
    Path(f"{prefix}.json").write_text(content)
    with pytest.raises(UserError, match="prepare the data again"):
        configure("--data-path", prefix)


def test_shares_are_kept_as_given():
    assert parse_split("0.9, .05,5e-2") == (0.9, 0.05, 0.05)
    assert parse_split("100") == (100, 0, 0)


def test_position_ids_that_the_model_would_not_read_are_refused(configure):
    reset = configure("--mock-data", "--reset-position-ids")
    check_positions(reset, "learned_absolute")
    check_positions(configure("--mock-data"), "rope")
    with pytest.raises(UserError, match="rope, which reads no position ids"):
        check_positions(reset, "rope")
