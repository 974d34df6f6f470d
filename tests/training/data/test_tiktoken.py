# SPDX-License-Identifier: Apache-2.0
"""The TikTokenizer gives the ids of Megatron-Core's class, and its text comes back."""

import base64
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer as upstream

from megatron_moevement.cli import main as command
from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron import tiktoken as ours
from megatron_moevement.training.data import tiktoken_files
from megatron_moevement.training.data.tiktoken_files import TikTokenizer
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import DecodeErrors, TokenizerType
from tests.harness.tiny_job import TINY

MERGES = [
    b"he",
    b"lo",
    b"hel",
    b"hello",
    b" w",
    b"or",
    b" wor",
    b"ld",
    b"\xc3\xb6",
    b"\xe2\x98",
    b"\n\n",
    b"aB",
]
SPECIAL = (*ours.SPECIAL_TOKENS, "<turn>")
NUMBER = 12
SIZE = NUMBER + 256 + len(MERGES)
SPLITTINGS = {pattern: ours.Splitting(pattern, NUMBER, SPECIAL) for pattern in ours.PATTERNS}


def entries(tokens):
    return [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode("utf-8", "replace"),
        }
        for rank, token in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A file with all bytes and a few merges, and two tokens that no vocabulary below has."""
    path = tmp_path_factory.mktemp("model") / "tokens.json"
    tokens = [*(bytes([one]) for one in range(256)), *MERGES, b"he hello", b"xyz"]
    path.write_text(json.dumps(entries(tokens)))
    return path


@pytest.fixture(scope="module", params=ours.PATTERNS)
def both(model, request):
    """Returns the tokenizer, and Megatron-Core's."""
    mine = TikTokenizer(
        model, DecodeErrors.REPLACE, splitting=SPLITTINGS[request.param], vocab_size=SIZE
    )
    theirs = upstream.TikTokenTokenizer(
        str(model),
        special_tokens=list(SPECIAL),
        num_special_tokens=NUMBER,
        pattern=request.param,
        vocab_size=SIZE,
    )
    return mine, theirs


TEXTS = st.lists(
    st.text()
    | st.sampled_from(
        ["hello world", "aB", "\n\n", "\u2603", "12345", " </s>", "<turn>", "<SPECIAL_9>"]
    )
).map("".join)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_ids_are_megatrons_and_the_text_comes_back(both, data):
    mine, theirs = both
    text = data.draw(TEXTS)
    ids = mine.tokenize(text)
    assert ids.tolist() == theirs.text_to_ids(text)
    assert mine.detokenize(ids) == text


@settings(max_examples=200, deadline=None)
@given(content=st.binary())
def test_bytes_that_are_no_text_follow_the_policy(both, content):
    mine, theirs = both
    text = content.decode("utf-8", "replace")
    assert mine.tokenize(content).tolist() == theirs.text_to_ids(text)
    assert mine.detokenize(mine.tokenize(content)) == text


def test_strict_refuses_what_is_no_text(model):
    tokenizer = TikTokenizer(model, splitting=SPLITTINGS["v2"], vocab_size=SIZE)
    with pytest.raises(UnicodeDecodeError):
        tokenizer.tokenize(b"he\xff")


def test_sizes_and_the_end_of_a_document_are_megatrons(both):
    mine, theirs = both
    assert (mine.vocab_size, mine.eod) == (theirs.vocab_size, theirs.eod)
    assert mine.tokenize("he</s>").tolist() == [NUMBER + 256, mine.eod]


def test_a_letter_of_several_ids_comes_back_and_half_of_one_is_shown(both):
    mine, _ = both
    ids = mine.tokenize("\u2603")
    assert len(ids) == 2
    assert mine.detokenize(ids) == "\u2603"
    assert mine.detokenize(ids[:1]) == "\ufffd"


def test_the_pattern_decides_where_text_is_cut(model):
    ids = {
        pattern: TikTokenizer(model, splitting=splitting, vocab_size=SIZE).tokenize("aB").size
        for pattern, splitting in SPLITTINGS.items()
    }
    assert ids == {"v1": 1, "v2": 2}


def test_what_is_taken_of_megatron_core_is_what_it_has():
    assert list(ours.SPECIAL_TOKENS) == upstream.SPECIAL_TOKENS
    assert ours.DEFAULT_VOCABULARY == upstream.DEFAULT_TIKTOKEN_MAX_VOCAB
    theirs = inspect.signature(upstream.TikTokenTokenizer).parameters
    assert theirs["num_special_tokens"].default == ours.DEFAULT_SPLITTING.num_special
    assert theirs["pattern"].default == ours.DEFAULT_SPLITTING.pattern


def test_identity_is_all_that_decides_ids(model, tmp_path):
    def identity(path=model, pattern="v2", number=NUMBER, special=SPECIAL, size=SIZE):
        splitting = ours.Splitting(pattern, number, special)
        return TikTokenizer(path, splitting=splitting, vocab_size=size).unique_identifiers

    first = identity()
    assert first["class"] == "TikTokenizer"
    assert identity(Path(shutil.copy(model, tmp_path / "copy.json"))) == first
    changed = tmp_path / "changed.json"
    tokens = [*(bytes([one]) for one in range(256)), *reversed(MERGES), b"he hello", b"xyz"]
    changed.write_text(json.dumps(entries(tokens)))
    others = [
        identity(changed),
        identity(pattern="v1"),
        identity(number=NUMBER + 1, size=SIZE + 1),
        identity(special=(*ours.SPECIAL_TOKENS, "<other>")),
        identity(size=SIZE - 1),
    ]
    assert first not in others
    assert len({one["sha256"] for one in others[:4]} | {first["sha256"]}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"special": ("<s>", "</s>")}, "lacks <unk> <mask>"),
        ({"special": (*SPECIAL, "<turn>")}, "has a token twice"),
        ({"special": (*SPECIAL, "<SPECIAL_10>")}, "has a token twice, or one that fills"),
        ({"number": 7}, "7 must be at least 8"),
        ({"number": SIZE}, "below the size of the vocabulary"),
        ({"size": SIZE + 3}, rf"has {256 + len(MERGES) + 2} tokens.*--vocab-size {SIZE + 2}"),
    ],
)
def test_what_contradicts_each_other_is_refused(model, changes, message):
    splitting = ours.Splitting("v2", changes.get("number", NUMBER), changes.get("special", SPECIAL))
    with pytest.raises(UserError, match=message):
        TikTokenizer(model, splitting=splitting, vocab_size=changes.get("size", SIZE))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no list of tokens"),
        ("[1]", "no list of tokens"),
        (json.dumps({"a": 1}), "no list of tokens"),
        (json.dumps(entries([b"a"] * 300)), "entry 0 is no single byte"),
        (json.dumps(entries([b"\x00"])[:1] * 300), "entry 1 is"),
        (json.dumps(entries([*(bytes([one]) for one in range(256)), b"a"])), "has a token twice"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, content, message):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        TikTokenizer(path, splitting=ours.Splitting("v2", 8, SPECIAL), vocab_size=8 + 257)


def test_a_file_that_is_missing_or_of_another_name_is_refused(tmp_path):
    for name, message in (("no.json", "No such file"), ("tokens.model", "a file .json")):
        with pytest.raises(UserError, match=message):
            TikTokenizer(tmp_path / name)
    with pytest.raises(UserError, match=r"needs --tokenizer-model: a file \.json of tokens"):
        TokenizerSpec(TokenizerType.TIKTOKEN).build()
    with pytest.raises(UserError, match="ByteTokenizer is not made of it"):
        TokenizerSpec(TokenizerType.BYTE, splitting=SPLITTINGS["v1"]).build()


def test_without_the_package_it_is_refused(model, monkeypatch):
    monkeypatch.setattr(tiktoken_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="tiktoken is not installed; pip install tiktoken"):
        TikTokenizer(model, splitting=SPLITTINGS["v2"], vocab_size=SIZE)


def test_a_job_reads_its_flags_without_torch(model):
    source = (
        "import sys\n"
        "from megatron_moevement.training.arguments import parse\n"
        "arguments = parse(sys.argv[1:], 1)\n"
        "print(arguments.data.tokenizer.unique_identifiers['sha256'], 'torch' in sys.modules)\n"
        "print(arguments.data.tokenizer.eod, arguments.data.vocab_size)\n"
    )
    flags = [
        *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(model)),
        *(f"--vocab-size={SIZE}", f"--tiktoken-num-special-tokens={NUMBER}"),
        *("--tiktoken-pattern=v1", "--tiktoken-special-tokens", *reversed(SPECIAL)),
    ]
    result = subprocess.run(
        [sys.executable, "-c", source, *TINY, *flags], capture_output=True, text=True, check=True
    )
    splitting = ours.Splitting("v1", NUMBER, tuple(reversed(SPECIAL)))
    tokenizer = TikTokenizer(model, splitting=splitting, vocab_size=SIZE)
    digest = tokenizer.unique_identifiers["sha256"]
    assert result.stdout.split() == [digest, "False", "5", str(SIZE)]


def test_data_are_prepared_and_shown_with_it(model, tmp_path, capsys, both):
    text = "hello w\u00f6rld \u2603\n\n" * 20
    (tmp_path / "a.txt").write_text(text)
    flags = [
        *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(model)),
        *(f"--vocab-size={SIZE}", f"--tiktoken-num-special-tokens={NUMBER}"),
        *("--tiktoken-special-tokens", *SPECIAL),
    ]
    prefix = str(tmp_path / "data")
    prepare = ["data", "prepare", "--input", str(tmp_path / "a.txt"), "--output-prefix", prefix]
    assert command([*prepare, *flags, "--workers=1"]) == 0
    capsys.readouterr()
    assert command(["data", "inspect", prefix, *flags, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    mine = TokenizerSpec(
        TokenizerType.TIKTOKEN, str(model), SIZE, splitting=SPLITTINGS["v2"]
    ).build()
    assert shown["first_tokens"] == mine.tokenize(text).tolist()[: len(shown["first_tokens"])]
    assert text.startswith(shown["first_text"])
    assert command(["data", "inspect", prefix, *flags, "--tiktoken-pattern=v1"]) == 2
    assert "was made with TikTokenizer" in capsys.readouterr().err
