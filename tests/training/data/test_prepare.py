# SPDX-License-Identifier: Apache-2.0
"""Preparation: what comes out, whatever the workers, and nothing half whatever happens."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.indexed import open_indexed
from megatron_moevement.training.data import documents
from megatron_moevement.training.data.documents import InputFormat, Search
from megatron_moevement.training.data.manifest import read_manifest
from megatron_moevement.training.data.prepare import Existing, Preparation, prepare
from megatron_moevement.training.data.tokenizer_spec import TokenizerSpec
from megatron_moevement.training.data.tokenizers import ByteTokenizer, TokenizerType

ALL = Search(("*",))


def work_on(inputs: list[Path], prefix: Path, **changes: object) -> Preparation:
    plan = Preparation(tuple(inputs), str(prefix), TokenizerSpec(TokenizerType.BYTE), ALL)
    return replace(plan, **changes)


def silently(_done: int, _total: int) -> None:
    pass


def texts_of(prefix: Path) -> list[bytes]:
    dataset = open_indexed(str(prefix))
    return [bytes(dataset.get(index).tolist()) for index in range(len(dataset))]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def library(tmp_path):
    """A folder of text, some of it to be left out."""
    folder = tmp_path / "library"
    files = {
        "b.py": b"import os\n",
        "a/z.py": b"\xff\x00 not text",
        "a/a.py": b"",
        "a/notes.md": b"notes",
        "test/t.py": b"test",
        "a/test/t.py": b"test",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_becomes_a_document_per_file_in_sorted_order(library, tmp_path):
    search = Search(("*.py",), excluded=("test",))
    manifest = prepare(work_on([library], tmp_path / "out", search=search), silently)
    assert texts_of(tmp_path / "out") == [b"\xff\x00 not text", b"import os\n"]
    assert (manifest.documents, manifest.empty_documents, manifest.source.files) == (2, 1, 3)
    assert manifest.tokens == manifest.source.bytes == 21
    assert read_manifest(str(tmp_path / "out")) == manifest


def test_jsonl_lines_become_documents(tmp_path):
    lines = [{"text": "one", "title": "T"}, {"text": "zwei ü", "title": ""}]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    prepare(work_on([path], tmp_path / "out", json_keys=("title", "text")), silently)
    assert texts_of(tmp_path / "out") == [b"T\none", "\nzwei ü".encode()]


def test_each_document_may_be_ended(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("ab")
    manifest = prepare(work_on([path, path], tmp_path / "out", append_eod=True), silently)
    dataset = open_indexed(str(tmp_path / "out"))
    assert [dataset.get(index).tolist() for index in range(2)] == [[97, 98, 256]] * 2
    assert manifest.max_token_id == ByteTokenizer().eod


def test_the_manifest_states_the_entropy_of_single_tokens(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("aaaabbcd")
    manifest = prepare(work_on([path], tmp_path / "out"), silently)
    assert manifest.unigram_entropy_nats == pytest.approx(1.75 * math.log(2), rel=1e-15)


def test_output_does_not_depend_on_the_number_of_workers(tmp_path, library, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_BYTES", 700)
    lines = tmp_path / "lines.jsonl"
    with lines.open("w") as file:
        for number in range(300):
            file.write(json.dumps({"text": f"{number} " * (number % 40)}) + "\n")
    inputs = [lines, library, lines]
    for workers in (1, 2, 3):
        (tmp_path / str(workers)).mkdir()
        search = Search(("*.py", "*.md"))
        plan = work_on(inputs, tmp_path / str(workers) / "out", search=search, workers=workers)
        prepare(plan, silently)
    expected = [(f"{n} " * (n % 40)).encode() for n in range(300) if n % 40]
    found = texts_of(tmp_path / "1" / "out")
    assert found[: len(expected)] == found[-len(expected) :] == expected
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


def test_a_line_belongs_to_the_piece_in_which_it_starts(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (n % 7)}) + "\n" for n in range(1, 30)))
    expected = [b"x" * (n % 7) for n in range(1, 30) if n % 7]
    for piece_bytes in range(1, 60):
        monkeypatch.setattr(documents, "BATCH_BYTES", piece_bytes)
        prefix = tmp_path / f"out{piece_bytes}"
        prepare(work_on([path], prefix), silently)
        assert texts_of(prefix) == expected


def test_the_source_digest_sees_names_contents_and_order(tmp_path):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("one")
    b.write_text("two")

    def digest(*inputs: Path) -> str:
        plan = work_on(list(inputs), tmp_path / "out", existing=Existing.REPLACE)
        return prepare(plan, silently).source.sha256

    first = digest(a, b)
    assert digest(a, b) == first
    assert digest(b, a) != first
    b.rename(tmp_path / "c.txt")
    assert digest(a, tmp_path / "c.txt") != first


def test_progress_ends_at_the_size_of_the_input(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 50}) * 1 + "\n" + '{"text": "y"}\n' * 40)
    seen: list[tuple[int, int]] = []
    prepare(work_on([path], tmp_path / "out"), lambda done, total: seen.append((done, total)))
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{broken", "the line at byte 1400: not JSON"),
        (b'{"other": "x"}', "the line at byte 1400: no text under the key 'text'"),
        (b'{"text": 7}', "no text under the key 'text'"),
        (b"[1]", "no text under the key 'text'"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "\xff"}', "choose --decode-errors"),
    ],
)
def test_bad_lines_are_named_and_nothing_is_written(
    tmp_path, content, message, workers, monkeypatch
):
    monkeypatch.setattr(documents, "BATCH_BYTES", 500)
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"text": "x"}\n' * 100 + content + b"\n")
    with pytest.raises(UserError, match=message) as refusal:
        prepare(work_on([path], tmp_path / "new" / "out", workers=workers), silently)
    assert str(path) in str(refusal.value)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [folder / "none"], "no such file or folder"),
        (lambda folder: [folder], "no file matches"),
        (lambda folder: [folder / "empty.txt"], "no document has a token"),
    ],
)
def test_input_without_text_is_refused(tmp_path, make, message):
    (tmp_path / "empty.txt").write_text("")
    plan = work_on(make(tmp_path), tmp_path / "out", search=Search(("*.py",)))
    with pytest.raises(UserError, match=message):
        prepare(plan, silently)
    assert os.listdir(tmp_path) == ["empty.txt"]


def test_text_can_be_read_as_lines_of_json_when_asked(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text('{"text": "x"}')
    search = Search(("*",), input_format=InputFormat.JSONL)
    prepare(work_on([path], tmp_path / "out", search=search), silently)
    assert texts_of(tmp_path / "out") == [b"x"]


@pytest.fixture
def two_texts(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).write_text(f"{name} text")
    return tmp_path / "old", tmp_path / "new"


def test_a_data_set_is_replaced_only_when_asked(two_texts, tmp_path):
    old, new = two_texts
    prepare(work_on([old], tmp_path / "out"), silently)
    with pytest.raises(UserError, match=r"out.bin exists; .* --overwrite"):
        prepare(work_on([new], tmp_path / "out"), silently)
    assert texts_of(tmp_path / "out") == [b"old text"]
    prepare(work_on([new], tmp_path / "out", existing=Existing.REPLACE), silently)
    assert texts_of(tmp_path / "out") == [b"new text"]


def test_two_preparations_of_one_data_set_exclude_each_other(two_texts, tmp_path):
    old, new = two_texts
    refusals = []

    def prepare_too(_done: int, _total: int) -> None:
        with pytest.raises(UserError) as refusal:
            prepare(work_on([new], tmp_path / "out"), silently)
        refusals.append(str(refusal.value))

    prepare(work_on([old], tmp_path / "out"), prepare_too)
    assert len(refusals) == 1
    assert "another process is preparing" in refusals[0]
    assert texts_of(tmp_path / "out") == [b"old text"]


def test_output_that_cannot_be_written_is_refused(two_texts, tmp_path):
    old, new = two_texts
    with pytest.raises(UserError, match="nothing was prepared"):
        prepare(work_on([old], new / "out"), silently)
    with pytest.raises(UserError, match="give a folder and a name"):
        prepare(replace(work_on([old], tmp_path), prefix=f"{tmp_path}/"), silently)


def test_a_full_disk_leaves_nothing(two_texts, tmp_path, monkeypatch):
    def no_space(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match="No space left on device; nothing was prepared"):
        prepare(work_on([two_texts[0]], tmp_path / "folder" / "out"), silently)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]


def die_while_tokenizing(folder: str) -> None:
    def die(_done: int, _total: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    prepare(work_on([Path(folder, "new")], Path(folder, "out"), existing=Existing.REPLACE), die)


def die_while_publishing(folder: str, replacements: int) -> None:
    replace_file = os.replace
    left = iter(range(replacements))

    def replace_or_die(source: Path, target: Path) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    os.replace = replace_or_die
    plan = work_on([Path(folder, "new")], Path(folder, "out"), existing=Existing.REPLACE)
    prepare(plan, silently)


@pytest.mark.distributed
@pytest.mark.parametrize("replacements", [None, 0, 1, 2])
def test_a_kill_leaves_no_torn_data_set(two_texts, tmp_path, megatron_fork_server, replacements):
    old, new = two_texts
    prepare(work_on([old], tmp_path / "out"), silently)
    if replacements is None:
        killed, args = die_while_tokenizing, [str(tmp_path)]
    else:
        killed, args = die_while_publishing, [str(tmp_path), replacements]
    job = megatron_fork_server.run(killed, world_size=1, args=args)
    assert job.exit_codes == (-signal.SIGKILL,)
    if replacements is None:
        assert texts_of(tmp_path / "out") == [b"old text"]
    else:
        with pytest.raises(UserError, match=r"out.idx: No such file"):
            texts_of(tmp_path / "out")
    prepare(work_on([new], tmp_path / "out", existing=Existing.REPLACE), silently)
    assert texts_of(tmp_path / "out") == [b"new text"]
    assert set(os.listdir(tmp_path)) == {"old", "new", "out.bin", "out.idx", "out.json"}


DIE_WITH_WORKERS = """
import multiprocessing, os, pathlib, signal, sys
from megatron_moevement.training.data import documents, tokenizer_spec, worker_pool

if __name__ == "__main__":
    spec = tokenizer_spec.TokenizerSpec(tokenizer_spec.TokenizerType.BYTE)
    documents.BATCH_BYTES = 10
    batches = documents.find_batches([pathlib.Path(sys.argv[1])] * 50, documents.Search(("*",)))
    reading = documents.Reading(spec, ("text",), False, "uint16")
    running = worker_pool.tokenized_batches(spec.build(), reading, batches, 2)
    next(running)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_workers_end_with_their_parent(two_texts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(DIE_WITH_WORKERS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), str(two_texts[0])]
    ended = subprocess.run(
        command, check=False, env=environment, stdout=subprocess.PIPE, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"workers {pids} outlive their parent"
        time.sleep(0.02)
