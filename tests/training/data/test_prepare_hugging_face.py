# SPDX-License-Identifier: Apache-2.0
"""Preparation with a HuggingFace tokenizer from a local file."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.indexed import open_indexed
from megatron_moevement.training.data import documents
from megatron_moevement.training.data.documents import Search
from megatron_moevement.training.data.prepare import Preparation, prepare
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import DecodeErrors, TokenizerType


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "</s>": 70_000}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def work_on(path: Path, model: Path, workers: int, errors: DecodeErrors) -> Preparation:
    spec = TokenizerSpec(TokenizerType.HUGGING_FACE, str(model), decode_errors=errors)
    return Preparation(
        (path,),
        str(path.parent / f"out{workers}"),
        spec,
        Search(("*",)),
        append_eod=True,
        workers=workers,
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_are_tokenized_and_ended(tmp_path, model, workers, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_BYTES", 10)
    path = tmp_path / "a.jsonl"
    texts = ["one two one", "two", "", "three"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plan = work_on(path, model, workers, DecodeErrors.STRICT)
    manifest = prepare(plan, lambda *_: None)
    dataset = open_indexed(plan.prefix)
    end = 70_000
    found = [dataset.get(index).tolist() for index in range(len(dataset))]
    assert found == [[1, 2, 1, end], [2, end], [0, end]]
    assert (manifest.dtype, manifest.max_token_id, manifest.empty_documents) == ("int32", end, 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_bytes_that_are_no_text_need_a_policy(tmp_path, model, workers, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_BYTES", 1)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"one")
    (tmp_path / "in" / "b.txt").write_bytes(b"two \xff")
    plan = work_on(tmp_path / "in", model, workers, DecodeErrors.STRICT)
    with pytest.raises(UserError, match=r"b.txt: no UTF-8 .* choose --decode-errors"):
        prepare(plan, lambda *_: None)
    plan = work_on(tmp_path / "in", model, workers, DecodeErrors.IGNORE)
    assert prepare(plan, lambda *_: None).tokens == 4
