"""What a run is: the content of files counts, under whatever path they lie."""

import pytest
from tokenizers import Tokenizer, models

from megatron_moevement.training.data import content
from megatron_moevement.training.run_identity import identify
from tests.harness.random_text import prepare_random_text
from tests.harness.tiny_job import tiny_arguments


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
