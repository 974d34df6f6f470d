# SPDX-License-Identifier: Apache-2.0
"""`moevement inspect` and `moevement clean` on real stores in shared memory."""

import json
import os
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_moevement.cli import main
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.hashed_bytes import HASHED
from megatron_moevement.runtime.slots.journal import JournalShape, JournalState
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.slot_record import EXTRAS, SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.flushing import flush_store
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
    default_store_dir,
    folder_bytes,
)
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from tests.harness.one_schedule import one_schedule

RING = RingShape.equal(capacity=4, buffer_bytes=200, max_parts=3)
JOURNAL = JournalShape(retained_steps=5, entry_bytes=50, last_step=10)
FIRST, SECOND = LogicalRank(), LogicalRank(dp=1)
WINDOW = Window(2, 2)


@pytest.fixture
def store_dir(monkeypatch, shared_memory):
    """Returns a store directory with a run of two processes that were killed."""
    monkeypatch.setenv("COLUMNS", "200")
    for process, own, other in ((0, FIRST, SECOND), (1, SECOND, FIRST)):
        with opened(shared_memory, process) as store:
            journal = store.journal(JOURNAL)
            for step in range(1, 4):
                state = JournalState(0, one_schedule(2), step, WINDOW if step == 3 else None, own)
                journal.commit(state, step, b"{}", 0.5)
            for role, owner in ((RingRole.OWN, own), (RingRole.HELD, other)):
                ring = store.ring(role, owner, RING)
                for step in (2, 3) if role is RingRole.OWN else (2,):
                    write(ring, step)
    return shared_memory


def opened(folder, process, run_id="run-1"):
    return StoreDirectory(folder, StoreIdentity(run_id, "0123abcd"), process)


def write(ring, step):
    buffer = ring.reserve(step)
    buffer[:50] = (f"{ring.owner} {step};" * 10).encode()[:50]
    parts = (SlotPart.of("head", 0, buffer[:30]), SlotPart.of(EXTRAS, 32, buffer[32:50]))
    ring.publish(SlotRecord(0, WINDOW, step - 2, step, 50, parts))


def said(capsys, *arguments):
    """Returns the lines that a command prints, their spaces made one."""
    assert main([*map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return [" ".join(line.split()) for line in captured.out.splitlines()]


def flip(path, at):
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)


def test_a_summary_is_a_line_for_each_run(store_dir, capsys):
    (line,) = said(capsys, "inspect", "--store-dir", store_dir, "--summary")
    assert line.startswith("run run-1: 2 processes, ")
    assert line.endswith(
        "0 of them in use, step 3 committed, windows up to step 3 persisted, 6 slots"
    )
    (document,) = said_json(capsys, "inspect", "--store-dir", store_dir, "--summary")["runs"]
    assert (document["committed"], document["slots"], document["troubles"]) == ([3, 3], 6, 0)


def test_a_summary_reads_no_slot(store_dir, capsys):
    before = HASHED.total
    said(capsys, "inspect", "--store-dir", store_dir, "--summary")
    assert HASHED.total == before
    said(capsys, "inspect", "--store-dir", store_dir)
    assert HASHED.total > before


def test_inspect_refuses_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["inspect", "--store-dir", str(tmp_path / "none")]) == 2
    assert "is not there; give the run's --moevement-store-dir" in capsys.readouterr().err


def said_json(capsys, *arguments):
    return json.loads("\n".join(said(capsys, *arguments, "--json")))


def test_inspect_shows_processes_slots_and_holders(store_dir, capsys):
    lines = said(capsys, "inspect", "--store-dir", store_dir)
    assert lines[0].startswith("run run-1: 2 processes, ")
    assert lines[0].endswith(", layout 0123abcd")
    assert lines[2].startswith("0 nobody pp0.dp0.tp0.cp0.ep0 3 2 to 3, epoch 0 1 to 3 ")
    assert lines[3].startswith("1 nobody pp0.dp1.tp0.cp0.ep0 3 2 to 3, epoch 0 1 to 3 ")
    assert lines[5:] == [
        "pp0.dp0.tp0.cp0.ep0 2 to 3, epoch 0 0 2 50 bytes p0 (own), p1 ok",
        "pp0.dp0.tp0.cp0.ep0 2 to 3, epoch 0 1 3 50 bytes p0 (own) ok",
        "pp0.dp1.tp0.cp0.ep0 2 to 3, epoch 0 0 2 50 bytes p0, p1 (own) ok",
        "pp0.dp1.tp0.cp0.ep0 2 to 3, epoch 0 1 3 50 bytes p1 (own) ok",
    ]


def test_inspect_tells_programs_everything(store_dir, capsys):
    document = json.loads("".join(said(capsys, "inspect", "--json", "--store-dir", store_dir)))
    (run,) = document["runs"]
    assert (run["run_id"], run["fingerprint"], run["format_version"]) == ("run-1", "0123abcd", 5)
    first = run["processes"][0]
    assert first["locked_by"] is None
    assert first["bytes"] > 4 * 4 * 200
    assert first["journal"]["ledger"] == [1, 3]
    assert first["journal"]["losses"] == 3
    assert first["journal"]["state"] == {
        "era": 0,
        "timetable": one_schedule(2).document(),
        "committed": 3,
        "persisted": {"start": 2, "size": 2, "epoch": 0},
        "rank": str(FIRST),
    }
    held, own = first["rings"]
    assert (held["role"], held["owner"]) == ("held", str(SECOND))
    assert (own["role"], own["owner"], own["capacity"]) == ("own", str(FIRST), 4)
    assert [slot["step"] for slot in own["slots"]] == [2, 3]
    for slot in own["slots"]:
        data = Path(own["path"]).read_bytes()[slot["file_offset"] :]
        assert data.startswith(f"{FIRST} {slot['step']};".encode())
        assert slot["parts"][1]["file_offset"] == slot["file_offset"] + 32
        assert slot["damaged"] == []


@pytest.mark.parametrize(("part", "name"), [(0, "head"), (1, EXTRAS)])
def test_inspect_names_the_part_whose_byte_was_flipped(store_dir, capsys, part, name):
    arguments = ("inspect", "--store-dir", store_dir)
    document = json.loads("".join(said(capsys, *arguments, "--json")))
    ring = document["runs"][0]["processes"][1]["rings"][0]
    place = ring["slots"][0]["parts"][part]
    flip(Path(ring["path"]), place["file_offset"] + place["bytes"] - 1)
    document = json.loads("".join(said(capsys, *arguments, "--json")))
    assert document["runs"][0]["processes"][1]["rings"][0]["slots"][0]["damaged"] == [name]
    lines = said(capsys, *arguments)
    assert lines[5].endswith(f"p0 (own), p1 p1: {name} damaged")
    assert all(line.endswith(" ok") for line in lines[6:])


def test_inspect_tells_of_files_that_it_cannot_read(store_dir, capsys):
    folder = store_dir / "run-1" / "process-0"
    for name in ("journal", f"own-{FIRST}.ring"):
        flip(folder / name, 40)
    (store_dir / "run-1" / "process-1" / "journal").unlink()
    lines = said(capsys, "inspect", "--store-dir", store_dir)
    assert lines[2].startswith("0 nobody - - - - ")
    assert lines[3].startswith("1 nobody - - - - ")
    assert lines[-2:] == [
        f"{folder}/journal has a damaged header",
        f"{folder}/own-{FIRST}.ring has a damaged header",
    ]


def test_inspect_looks_at_a_store_in_use_and_changes_nothing(store_dir, capsys):
    files = [path for path in store_dir.rglob("*") if path.is_file() and path.name != "lock"]
    with opened(store_dir, 0) as store:
        store.open_ring(RingRole.OWN, FIRST).invalidate(3)
        before = {path: path.read_bytes() for path in files}
        lines = said(capsys, "inspect", "--store-dir", store_dir)
        assert lines[2].startswith(f"0 pid {os.getpid()} ")
        assert {path: path.read_bytes() for path in files} == before
    assert len(lines) == 8


@pytest.mark.parametrize("command", [["inspect"], ["clean", "--all"]], ids=lambda words: words[0])
def test_where_nothing_is_there_is_nothing_to_do(tmp_path, capsys, command):
    (tmp_path / "something else").mkdir()
    assert said(capsys, *command, "--store-dir", tmp_path) == [f"nothing in {tmp_path}"]
    assert [path.name for path in tmp_path.iterdir()] == ["something else"]


def test_clean_has_nothing_to_do_where_no_folder_is(tmp_path, capsys):
    folder = tmp_path / "missing"
    assert said(capsys, "clean", "--all", "--store-dir", folder) == [f"nothing in {folder}"]


@pytest.mark.parametrize("command", [["inspect"], ["clean", "--all"]], ids=lambda words: words[0])
def test_a_store_directory_that_is_a_file_is_refused(tmp_path, capsys, command):
    (tmp_path / "file").write_text("")
    assert main([*command, "--store-dir", str(tmp_path / "file")]) == 2
    assert "can't read" in capsys.readouterr().err


def test_clean_removes_what_was_left_and_says_so(store_dir, capsys):
    folder = store_dir / "run-1"
    lines = said(capsys, "clean", "--all", "--store-dir", store_dir)
    assert [line.split(":")[0] for line in lines] == [
        f"removed {folder}/process-0",
        f"removed {folder}/process-1",
    ]
    assert all("kB" in line for line in lines)
    assert list(store_dir.iterdir()) == []


def test_clean_removes_the_run_that_it_is_told_only(store_dir, capsys):
    opened(store_dir, 0, "run-2").close()
    assert said(capsys, "clean", "--store-dir", store_dir, "--run-id", "run-3") == [
        f"nothing of run run-3 in {store_dir}"
    ]
    said(capsys, "clean", "--store-dir", store_dir, "--run-id", "run-2")
    assert [path.name for path in store_dir.iterdir()] == ["run-1"]


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["clean", "dry-run"])
def test_clean_leaves_a_run_of_which_a_process_lives_as_it_is(store_dir, capsys, dry_run):
    opened(store_dir, 0, "run-2").close()
    with opened(store_dir, 1):
        assert main(["clean", "--all", "--store-dir", str(store_dir), *dry_run]) == 2
        captured = capsys.readouterr()
        (line,) = captured.out.splitlines()
        assert f"remove {store_dir}/run-2/" in line.replace("removed", "remove")
        assert "run run-1 stays as it is" in captured.err
        assert f"process-1 is in use by process {os.getpid()} of " in captured.err
    # That of the dead process is still there, too.
    assert len(list((store_dir / "run-1").iterdir())) == 2
    with opened(store_dir, 1) as store:
        assert store.open_ring(RingRole.OWN, SECOND) is not None
    assert (store_dir / "run-2").exists() == bool(dry_run)


def test_clean_removes_nothing_without_a_word_on_which(store_dir, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["clean", "--store-dir", str(store_dir)])
    assert ended.value.code == 2
    assert "one of the arguments --run-id --all is required" in capsys.readouterr().err
    assert len(list((store_dir / "run-1").iterdir())) == 2


def test_clean_says_what_it_would_remove(store_dir, capsys):
    lines = said(capsys, "clean", "--run-id", "run-1", "--dry-run", "--store-dir", store_dir)
    assert [line.split(":")[0] for line in lines] == [
        f"would remove {store_dir}/run-1/process-{number}" for number in (0, 1)
    ]
    assert len(list((store_dir / "run-1").iterdir())) == 2


def test_clean_tells_programs_what_is_gone_and_what_stays(store_dir, capsys):
    opened(store_dir, 0, "run-2").close()
    gone = store_dir / "run-2" / "process-0"
    size_bytes = folder_bytes(gone)
    with opened(store_dir, 1):
        assert main(["clean", "--all", "--json", "--store-dir", str(store_dir)]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["removed"] == {str(gone): size_bytes}
    assert not document["dry_run"]
    (reason,) = document["in_use"]
    assert reason.startswith("run run-1 stays as it is: ")


def test_each_user_has_a_store_directory_in_shared_memory():
    assert default_store_dir() == Path(f"/dev/shm/moevement-{os.geteuid()}")
    (field,) = [one for one in fields(FaultTolerance) if one.name == "moevement_store_dir"]
    told = str(default_store_dir()).replace(str(os.geteuid()), "<uid>")
    assert f"(default: {told})" in field.metadata["help"]


def test_what_a_job_flushed_is_cleaned_like_a_store(store_dir, tmp_path, capsys):
    with opened(store_dir, 0) as store:
        flushed = flush_store(store, tmp_path)
    (line,) = said(capsys, "clean", "--all", "--store-dir", tmp_path / "moevement" / "flushed")
    assert line.startswith(f"removed {flushed}: ")
    assert not flushed.exists()
    assert list(store_dir.rglob("process-*"))
