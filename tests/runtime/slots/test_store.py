# SPDX-License-Identifier: Apache-2.0
"""The folder of a process: locked, adopted, refused when it is another's, removed when done."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.journal import JournalShape, JournalState
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
    left_behind,
)
from megatron_moevement.runtime.stores.store_listing import survey
from megatron_moevement.runtime.stores.store_lock import StoreLockedError
from tests.harness.one_schedule import one_schedule

from .conftest import IDENTITY, OWNER, fill

RING = RingShape.equal(capacity=3, buffer_bytes=200, max_parts=3)
JOURNAL = JournalShape(retained_steps=3, entry_bytes=100, last_step=10)
STATE = JournalState(
    rollbacks=0, timetable=one_schedule(2), committed=3, persisted=None, rank=OWNER
)
OTHER = LogicalRank(dp=1)


def opened(root, process=0):
    return StoreDirectory(root, IDENTITY, process)


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_what_a_process_left_is_adopted(shared_memory):
    with opened(shared_memory) as store:
        assert store.open_journal() is None
        assert store.open_ring(RingRole.OWN, OWNER) is None
        store.journal(JOURNAL).write_state(STATE)
        written = fill(store.ring(RingRole.OWN, OWNER, RING), 4, byte=1)
        fill(store.ring(RingRole.HELD, OTHER, RING), 4, byte=9)
    with opened(shared_memory) as store:
        assert [(ring.role, ring.owner) for ring in store.rings()] == [
            (RingRole.HELD, OTHER),
            (RingRole.OWN, OWNER),
        ]
        assert store.journal(JOURNAL).state == STATE
        ring = store.ring(RingRole.OWN, OWNER, RING)
        assert ring.records() == (written,)
        assert ring.damaged_parts(written) == ()
        assert bytes(store.open_ring(RingRole.HELD, OTHER).buffer(4)[:1]) == bytes([9])
    assert files_below(shared_memory) == [
        "run-1/process-0/held-pp0.dp1.tp0.cp0.ep0.ring",
        "run-1/process-0/journal",
        "run-1/process-0/lock",
        "run-1/process-0/own-pp1.dp0.tp0.cp0.ep1.ring",
    ]


def test_everything_is_for_its_user_alone(shared_memory):
    with opened(shared_memory) as store:
        store.journal(JOURNAL)
        store.ring(RingRole.OWN, OWNER, RING)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (shared_memory / "run-1").rglob("*")
    }
    assert modes.pop("process-0") == 0o700
    assert set(modes.values()) == {0o600}


def test_a_removed_store_leaves_nothing(shared_memory):
    first, second = opened(shared_memory, 0), opened(shared_memory, 1)
    first.ring(RingRole.OWN, OWNER, RING)
    first.remove()
    assert files_below(shared_memory) == ["run-1/process-1/lock"]
    second.remove()
    assert list(shared_memory.iterdir()) == []
    with opened(shared_memory) as again:
        assert again.rings() == ()


def test_a_store_that_another_process_locks_while_it_is_removed_is_that_ones(
    shared_memory, monkeypatch
):
    store = opened(shared_memory, 0)
    remove = Path.rmdir
    taken = []

    def take_and_remove(folder):
        if not taken:
            taken.append(opened(shared_memory, 0))
        remove(folder)

    monkeypatch.setattr(Path, "rmdir", take_and_remove)
    store.remove()
    assert files_below(shared_memory) == ["run-1/process-0/lock"]
    taken[0].remove()
    assert list(shared_memory.iterdir()) == []


def come_and_go(root, process, times):
    for _ in range(times):
        opened(root, process).remove()


@pytest.mark.distributed
def test_a_store_may_be_opened_while_the_last_other_one_is_removed(shared_memory):
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=come_and_go, args=[shared_memory, number, 6000]) for number in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert list(shared_memory.iterdir()) == []


def test_two_jobs_never_write_the_same_store(shared_memory):
    with opened(shared_memory):
        with pytest.raises(StoreLockedError, match=f"is in use by process {os.getpid()} of "):
            opened(shared_memory)
        assert left_behind(shared_memory, "run-1") == ()
        opened(shared_memory, process=1).close()
        assert left_behind(shared_memory, "run-1") == (1,)
    opened(shared_memory).close()
    assert left_behind(shared_memory, "run-1") == (0, 1)
    assert left_behind(shared_memory, "run-2") == ()


@contextlib.contextmanager
def looked_at(look, *args):
    """Has another thread look all the time; what it meets is raised at the end."""
    is_done = threading.Event()

    def look_on():
        while not is_done.is_set():
            look(*args)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look_on)
        try:
            yield
        finally:
            is_done.set()
        looking.result()


def test_who_looks_at_a_store_is_never_in_the_way_of_who_opens_it(shared_memory):
    with looked_at(left_behind, shared_memory, "run-1"):
        for _ in range(1000):
            opened(shared_memory).close()


@pytest.mark.parametrize("look", [lambda root: left_behind(root, "run-1"), survey])
def test_a_store_may_be_removed_while_somebody_looks(shared_memory, look):
    with looked_at(look, shared_memory):
        for _ in range(3000):
            opened(shared_memory).remove()


@pytest.mark.distributed
def test_a_fork_does_not_keep_the_lock_of_its_parent(shared_memory):
    store = opened(shared_memory)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=lambda: (there.send("forked"), there.recv()))
    child.start()
    assert here.recv() == "forked"
    with pytest.raises(StoreLockedError):
        opened(shared_memory)
    store.close()
    opened(shared_memory).close()
    here.send("end")
    child.join()
    child.close()
    here.close()
    there.close()


OWNER_PROCESS = """
import sys, time
from pathlib import Path
from tests.runtime.slots.test_store import JOURNAL, opened
from tests.harness.one_schedule import one_schedule
store = opened(Path(sys.argv[1]))
store.journal(JOURNAL)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.distributed
def test_the_lock_of_a_killed_process_is_free(shared_memory):
    command = [sys.executable, "-c", OWNER_PROCESS, str(shared_memory)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(StoreLockedError) as refusal:
            opened(shared_memory)
        assert refusal.value.owner["pid"] == other.pid
        assert f"in use by process {other.pid} of " in str(refusal.value)
        other.send_signal(signal.SIGKILL)
    with opened(shared_memory) as store:
        assert store.open_journal().state is None
        note = json.loads((store.folder / "lock").read_text())
        assert note["pid"] == os.getpid()


def test_files_that_a_kill_left_half_made_are_removed(shared_memory):
    opened(shared_memory).close()
    half = shared_memory / "run-1" / "process-0" / "own-pp0.dp0.tp0.cp0.ep0.ring.creating"
    half.write_bytes(bytes(1000))
    with opened(shared_memory) as store:
        assert store.rings() == ()
        assert not half.exists()


def test_a_store_of_another_layout_is_refused(shared_memory):
    with opened(shared_memory) as store:
        store.journal(JOURNAL)
        store.ring(RingRole.OWN, OWNER, RING)
    with StoreDirectory(shared_memory, StoreIdentity("run-1", "ffff"), 0) as store:
        with pytest.raises(UserError, match="fingerprint"):
            store.open_journal()
        with pytest.raises(UserError, match="fingerprint"):
            store.ring(RingRole.OWN, OWNER, RING)


def test_a_ring_or_journal_of_other_sizes_is_refused(shared_memory):
    with opened(shared_memory) as store:
        store.journal(JOURNAL)
        store.ring(RingRole.OWN, OWNER, RING)
        with pytest.raises(UserError, match=r"'capacity': 3.* needs .*'capacity': 4"):
            store.ring(RingRole.OWN, OWNER, RingShape.equal(4, 200, 3))
        with pytest.raises(UserError, match=r"'retained_steps': 3.* needs .*'retained_steps': 4"):
            store.journal(JournalShape(4, 100, 10))
        made = store.create_ring(RingRole.OWN, OWNER, RingShape.equal(4, 200, 3))
        assert made.capacity == store.open_ring(RingRole.OWN, OWNER).capacity == 4


def test_a_journal_of_a_run_that_becomes_longer_or_shorter_keeps_what_it_has(shared_memory):
    with opened(shared_memory) as store:
        journal = store.journal(JOURNAL)
        for step in range(1, 4):
            state = dataclasses.replace(STATE, committed=step)
            journal.commit(state, step, b"entry %d" % step, loss=float(step))
    for last_step in (5000, 10):
        with opened(shared_memory) as store:
            journal = store.journal(JournalShape(3, 100, last_step))
            assert journal.shape.last_step == 5000
            assert journal.state == STATE
            assert [journal.entry(step) for step in (1, 2, 3)] == [
                b"entry 1",
                b"entry 2",
                b"entry 3",
            ]
            assert journal.losses() == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize("name", ["journal", "own-pp1.dp0.tp0.cp0.ep1.ring"])
def test_a_damaged_header_counts_as_missing_and_is_replaced(shared_memory, caplog, name):
    with opened(shared_memory) as store:
        store.journal(JOURNAL).write_state(STATE)
        fill(store.ring(RingRole.OWN, OWNER, RING), 4, byte=1)
    path = shared_memory / "run-1" / "process-0" / name
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with opened(shared_memory) as store:
        journal, ring = store.open_journal(), store.open_ring(RingRole.OWN, OWNER)
        assert (journal is None) == (name == "journal")
        assert (ring is None) == (name != "journal")
        assert f"{path} has a damaged header" in caplog.text
        store.journal(JOURNAL)
        store.ring(RingRole.OWN, OWNER, RING)
    with opened(shared_memory) as store:
        assert store.open_journal() is not None
        assert store.open_ring(RingRole.OWN, OWNER) is not None


def test_the_ring_of_another_owner_under_this_name_counts_as_missing(shared_memory):
    with opened(shared_memory) as store:
        path = store.ring(RingRole.OWN, OWNER, RING).path
        path.rename(path.with_name(f"held-{OTHER}.ring"))
    with opened(shared_memory) as store:
        assert store.open_ring(RingRole.HELD, OTHER) is None


def test_what_is_announced_has_to_fit(shared_memory):
    with opened(shared_memory) as store:
        store.check_space(RING.total_bytes + JOURNAL.total_bytes)
        status = os.statvfs(shared_memory)
        too_much = (status.f_bavail + 10_000) * status.f_frsize
        with pytest.raises(UserError, match=rf"needs {too_much} bytes .* has \d+ left") as refusal:
            store.check_space(too_much)
        assert "--moevement-store-dir" in str(refusal.value)


def test_a_place_that_takes_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't make the store .* --moevement-store-dir"):
        opened(tmp_path / "file")


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "run-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is another user's"):
        opened(tmp_path / "root")


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "-x", "a" * 101])
def test_a_run_id_names_a_folder(run_id):
    with pytest.raises(UserError, match="names a folder of the store"):
        StoreIdentity(run_id, "0123")
