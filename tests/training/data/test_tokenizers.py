# SPDX-License-Identifier: Apache-2.0
"""Tokenizers give back what they were given, and say what they can't take."""

import json
import shutil

import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import (
    SentencePieceTokenizer as UpstreamTokenizer,
)
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_moevement.errors import UserError
from megatron_moevement.training.data.file_tokenizers import (
    BytePairTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import (
    ByteTokenizer,
    DecodeErrors,
    NullTokenizer,
    TokenizerType,
    padded_vocab_size,
)
from tests.harness.sentence_piece import train_sentence_piece

WORDS = {"<unk>": 0, "a": 1, "b": 2, "\ufffd": 3, "the_end": 9}


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "the_end"}))
    return folder


@given(st.binary())
def test_bytes_are_taken_as_they_are(data):
    ids = ByteTokenizer().tokenize(data)
    assert bytes(ids.tolist()) == data
    assert not (ids == ByteTokenizer().eod).any()


@given(st.text())
def test_text_survives_the_byte_tokenizer(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_the_byte_tokenizer_shows_what_is_no_text():
    assert ByteTokenizer().detokenize([97, 255, 256]) == "a\ufffd<eod>"


def test_a_lone_surrogate_is_taken_as_its_bytes():
    assert ByteTokenizer().tokenize("\ud83d").tolist() == [0xED, 0xA0, 0xBD]


def test_null_tokenizer_reads_ids_and_refuses_others():
    tokenizer = NullTokenizer(10)
    assert tokenizer.tokenize("3 1\n10").tolist() == [3, 1, 10]
    assert tokenizer.detokenize(np.array([3, 10])) == "3 10"
    for wrong in ("11", "-1", "x"):
        with pytest.raises(ValueError, match=r"outside 0 to 10|invalid literal"):
            tokenizer.tokenize(wrong)


def test_a_huggingface_tokenizer_is_read_from_its_file_or_folder(model_folder):
    for model in (model_folder, model_folder / "tokenizer.json"):
        tokenizer = HuggingFaceTokenizer(model)
        assert tokenizer.tokenize(b"b a b").tolist() == [2, 1, 2]
        assert tokenizer.detokenize([2, 1]) == "b a"
        assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)


def test_identity_is_the_content_of_the_tokenizer_not_its_place(model_folder, tmp_path):
    identity = HuggingFaceTokenizer(model_folder).unique_identifiers
    copied = shutil.copytree(model_folder, tmp_path / "copy")
    assert HuggingFaceTokenizer(copied).unique_identifiers == identity
    changed = (copied / "tokenizer.json").read_text().replace('"a"', '"c"')
    (copied / "tokenizer.json").write_text(changed)
    assert HuggingFaceTokenizer(copied).unique_identifiers != identity


def test_bytes_that_are_no_text_follow_the_policy(model_folder):
    data = b"a \xff b"
    with pytest.raises(UnicodeDecodeError):
        HuggingFaceTokenizer(model_folder, DecodeErrors.STRICT).tokenize(data)
    replaced = HuggingFaceTokenizer(model_folder, DecodeErrors.REPLACE).tokenize(data)
    assert replaced.tolist() == [1, 3, 2]
    ignored = HuggingFaceTokenizer(model_folder, DecodeErrors.IGNORE).tokenize(data)
    assert ignored.tolist() == [1, 2]


def test_an_end_of_document_must_be_known(model_folder):
    config = model_folder / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "b"}}))
    assert HuggingFaceTokenizer(model_folder).eod == WORDS["b"]
    config.write_text(json.dumps({"eos_token": "nowhere"}))
    with pytest.raises(UserError, match="'nowhere' is no token"):
        HuggingFaceTokenizer(model_folder)
    config.unlink()
    with pytest.raises(UserError, match="no token that ends a document"):
        HuggingFaceTokenizer(model_folder)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    spec = TokenizerSpec(TokenizerType.HUGGING_FACE, str(tmp_path))
    with pytest.raises(UserError, match="no HuggingFace tokenizer"):
        spec.build()


def test_a_name_on_the_hub_is_what_was_downloaded_of_it(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    name, revision = "someone/a-model", "0123abcd"
    with pytest.raises(UserError, match=f"hf download {name} tokenizer.json"):
        TokenizerSpec(TokenizerType.HUGGING_FACE, name).build()
    cached = tmp_path / "hub" / "models--someone--a-model"
    shutil.copytree(model_folder, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    found = TokenizerSpec(TokenizerType.HUGGING_FACE, name).build()
    assert found.unique_identifiers == HuggingFaceTokenizer(model_folder).unique_identifiers


def test_what_is_neither_a_path_nor_a_name_is_refused():
    with pytest.raises(UserError, match=r"no such file or folder$"):
        TokenizerSpec(TokenizerType.HUGGING_FACE, "/no/such/folder").build()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        HuggingFaceTokenizer(tmp_path)


@given(st.integers(1, 10**6), st.integers(1, 256), st.integers(1, 16))
def test_padding_is_the_smallest_that_divides(vocab_size, divisible_by, tensor_parallel_size):
    padded = padded_vocab_size(vocab_size, divisible_by, tensor_parallel_size)
    multiple = divisible_by * tensor_parallel_size
    assert padded % multiple == 0
    assert vocab_size <= padded < vocab_size + multiple


@pytest.fixture
def pairs(tmp_path):
    """Writes GPT-2's two files, with few merges, and returns their paths."""
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "he", "\u0120he", "<|endoftext|>"]
    vocab.write_text(json.dumps({word: number for number, word in enumerate(words)}))
    merges.write_text("#version: 0.2\nh e\n\u0120 he\n")
    return vocab, merges


@given(text=st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_survives_pairs_of_bytes(pairs, text):
    tokenizer = BytePairTokenizer(*pairs, DecodeErrors.REPLACE)
    sound = text.encode("utf-8", "replace").decode()
    assert tokenizer.detokenize(tokenizer.tokenize(sound)) == sound


def test_pairs_of_bytes_are_merged_and_a_space_belongs_to_the_word(pairs):
    tokenizer = BytePairTokenizer(*pairs)
    assert tokenizer.tokenize("he he").tolist() == [256, 257]
    assert (tokenizer.eod, tokenizer.vocab_size) == (258, 259)
    assert tokenizer.unique_identifiers["class"] == "GPT2BPETokenizer"


def test_pairs_of_bytes_without_their_files_are_refused(pairs, tmp_path):
    vocab, merges = pairs
    with pytest.raises(UserError, match="needs --vocab-file and --merge-file"):
        TokenizerSpec(TokenizerType.GPT2_BPE, vocab_file=str(vocab)).build()
    with pytest.raises(UserError, match=r"--merge-file .*none"):
        BytePairTokenizer(vocab, tmp_path / "none")
    with pytest.raises(UserError, match="no pairs of bytes"):
        BytePairTokenizer(merges, merges)
    vocab.write_text('{"h": 0, "e": 1, "he": 2, "\u0120he": 3, "\u0120": 4}')
    with pytest.raises(UserError, match="ends a document"):
        BytePairTokenizer(vocab, merges)


SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory):
    """A model that falls back to bytes, as Llama's does."""
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(train_sentence_piece())
    return path


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_a_model_of_sentence_piece_gives_the_ids_of_megatrons_tokenizer(kind, sentence_piece):
    tokenizer = TokenizerSpec(TokenizerType(kind), str(sentence_piece)).build()
    theirs = UpstreamTokenizer(str(sentence_piece))
    for text in ("the cat  sat\n", "", "Öl \u2603 <s> x"):
        ids = tokenizer.tokenize(text)
        assert ids.tolist() == theirs.text_to_ids(text)
        assert tokenizer.detokenize(ids) == theirs.ids_to_text(ids)
    assert (tokenizer.vocab_size, tokenizer.eod) == (theirs.vocab_size, theirs.eod)
    assert tokenizer.unique_identifiers["class"] == SENTENCE_PIECE[0]


def test_what_is_no_model_of_sentence_piece_is_refused(tmp_path):
    with pytest.raises(UserError, match="needs --tokenizer-model: a model of SentencePiece"):
        TokenizerSpec(TokenizerType.LLAMA_2).build()
    with pytest.raises(UserError, match="No such file"):
        SentencePieceTokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_text("{}")
    with pytest.raises(UserError, match="no model of SentencePiece"):
        SentencePieceTokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_bytes(train_sentence_piece(eos_id=-1))
    with pytest.raises(UserError, match="no end of a sentence"):
        SentencePieceTokenizer(tmp_path / "tokenizer.model")
