# SPDX-License-Identifier: Apache-2.0
"""`moevement data`: prepares, inspects, and refuses bad input in one line with exit code 2."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megatron_moevement.cli import main
from megatron_moevement.integrations.megatron.indexed import DocumentWriter, read_facts
from megatron_moevement.training.data.manifest import read_manifest


def run(*words: str | Path) -> int:
    return main(["data", *map(str, words)])


@pytest.fixture
def prepared(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Hello, \x1b[31mworld\n" * 3)
    prefix = tmp_path / "out"
    assert run("prepare", "--input", tmp_path / "a.txt", "--output-prefix", prefix) == 0
    assert capsys.readouterr().out == (
        f"{prefix}: 1 documents, 54 tokens (uint16), unigram entropy "
        f"{read_manifest(str(prefix)).unigram_entropy_nats:.4f} nats\n"
    )
    return prefix


def test_inspect_shows_what_was_prepared(prepared, capsys):
    assert run("inspect", prepared, "--tokens", "12") == 0
    rows = dict(line.rstrip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["documents"] == "1"
    assert rows["tokens"] == "54"
    assert rows["type"] == "uint16"
    assert rows["made with"] == "ByteTokenizer"
    assert rows["first tokens"] == "72 101 108 108 111 44 32 27 91 51 49 109"
    assert rows["vocabulary"] == "257 ids, holds every id of the data"


def test_inspect_tells_programs_everything(prepared, capsys):
    assert run("inspect", prepared, "--tokens", "5", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("manifest") == json.loads(Path(f"{prepared}.json").read_text())
    assert document == {
        "documents": 1,
        "tokens": 54,
        "type": "uint16",
        "largest_id": 119,
        "first_tokens": [72, 101, 108, 108, 111],
        "first_text": "Hello",
        "vocab_size": 257,
    }


def test_prepare_tells_programs_what_it_made(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Hello")
    prefix = tmp_path / "out"
    words = ("--input", tmp_path / "a.txt", "--output-prefix", prefix, "--json")
    assert run("prepare", *words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("manifest") == json.loads(Path(f"{prefix}.json").read_text())
    sizes = {str(path): path.stat().st_size for path in tmp_path.glob("out.*") if path.is_file()}
    assert document == {"prefix": str(prefix), "bytes_by_file": sizes}
    assert {Path(name).suffix for name in sizes} == {".bin", ".idx", ".json"}


def test_inspect_does_not_let_data_drive_the_terminal(prepared, capsys):
    run("inspect", prepared)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"Hello, \x1b[31mworld" in out


def test_inspect_refuses_a_vocabulary_that_is_too_small(prepared, capsys):
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size")
    assert run("inspect", prepared, *null, "119") == 0
    assert run("inspect", prepared, *null, "118") == 2
    assert "holds the id 119, the vocabulary ends at 118" in capsys.readouterr().err


def test_inspect_reads_data_made_elsewhere(tmp_path, capsys):
    writer = DocumentWriter(tmp_path / "a", 10)
    writer.add(np.array([1, 2, 3, 9]), [3, 1])
    writer.finish()
    assert run("inspect", tmp_path / "a") == 0
    out = capsys.readouterr().out
    assert "largest id    9" in out
    assert "made with" not in out


def test_folders_are_searched_by_pattern(tmp_path, capsys):
    for name in ("b.py", "a.py", "no.txt", "test/c.py"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    prefix = tmp_path / "out"
    words = ("--pattern", "*.py", "--exclude", "test", "--append-eod", "--workers", "2")
    assert run("prepare", "--input", tmp_path / "in", "--output-prefix", prefix, *words) == 0
    assert run("inspect", prefix) == 0
    assert "'a.py<eod>b.py<eod>'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "--input", "none", "--output-prefix", "out"],
        ["prepare", "--input", "a.txt", "--output-prefix", "a.txt/out"],
        ["prepare", "--input", "a.txt", "--output-prefix", "out", "--workers", "0"],
        ["prepare", "--input", "a.txt", "--output-prefix", "out", "--input-format", "jsonl"],
        ["prepare", "--input", "a.txt", "--output-prefix", "out", "--tokenizer-model", "a.txt"],
        [
            *("prepare", "--input", "a.txt", "--output-prefix", "new/out"),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "a.txt"),
        ],
        ["inspect", "none"],
        ["inspect", "bad"],
    ],
)
def test_bad_input_ends_with_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    Path("bad.bin").write_bytes(b"x")
    Path("bad.idx").write_bytes(b"x" * 100)
    before = sorted(os.listdir())
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("moevement data: ")
    assert captured.err.count("\n") == 1
    assert sorted(os.listdir()) == before


def test_the_command_prepares_real_text_and_is_silent_without_a_terminal(tmp_path):
    prefix = tmp_path / "asyncio"
    words = ["--input", sysconfig.get_path("stdlib") + "/asyncio", "--output-prefix", str(prefix)]
    words += ["--pattern", "*.py", "--append-eod", "--workers", "1"]
    command = [sys.executable, "-m", "megatron_moevement.cli", "data", "prepare", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert ended.stderr == ""
    assert ended.stdout.startswith(f"{prefix}: ")
    manifest = read_manifest(str(prefix))
    assert manifest is not None
    facts = read_facts(str(prefix))
    assert (facts.documents, facts.tokens) == (manifest.documents, manifest.tokens)
    assert manifest.tokens == manifest.source.bytes + manifest.documents
    assert manifest.source.files >= 20
    assert 2.5 < manifest.unigram_entropy_nats < 4.0
