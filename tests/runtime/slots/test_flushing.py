# SPDX-License-Identifier: Apache-2.0
"""What a process flushed to durable storage comes back to whoever has its rank."""

import dataclasses
import os
import shutil

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.runtime.stores import flushing
from megatron_moevement.runtime.stores.adoption import adopt_store
from megatron_moevement.runtime.stores.flushing import (
    bring_back,
    flush_store,
    flushed_folder,
    remove_flushed,
)
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory

from .conftest import IDENTITY, OWNER
from .test_adoption import leave, opened


def flush(root, process, save):
    with opened(root, process) as store:
        return flush_store(store, save)


@pytest.fixture
def flushed(shared_memory, tmp_path):
    """Returns what process 7 flushed at step 8; its memory is gone."""
    written = leave(shared_memory, 7, step=8)
    flush(shared_memory, 7, tmp_path)
    shutil.rmtree(shared_memory / IDENTITY.run_id)
    return written


def test_a_flushed_store_comes_back_with_all_its_slots(shared_memory, tmp_path, flushed):
    folder = flushed_folder(tmp_path, IDENTITY)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER, [folder]) == 7
        assert own.open_journal().state.committed == 8
        ring = own.open_ring(RingRole.OWN, OWNER)
        assert ring.records() == (flushed,)
        assert ring.damaged_parts(flushed) == ()
    assert [path.name for path in folder.iterdir()] == ["process-7"]
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.*")} == {0o600}
    remove_flushed(folder)
    assert not folder.exists()


def test_what_is_in_memory_wins_unless_it_is_older(shared_memory, tmp_path, flushed):
    folder = flushed_folder(tmp_path, IDENTITY)
    for step, adopted in ((8, None), (9, None), (7, 7)):
        leave(shared_memory, 0, step=step)
        with opened(shared_memory, 0) as own:
            assert adopt_store(own, OWNER, [folder]) == adopted
            own.remove()
    leave(shared_memory, 5, step=9)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER, [folder]) == 5


def test_a_later_flush_replaces_an_earlier_one(shared_memory, tmp_path, flushed):
    leave(shared_memory, 7, step=9)
    flush(shared_memory, 7, tmp_path)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER, [flushed_folder(tmp_path, IDENTITY)]) == 7
        assert own.open_journal().state.committed == 9


def test_what_another_job_flushed_under_the_same_name_is_refused_and_kept(
    shared_memory, tmp_path, flushed
):
    folder = flushed_folder(tmp_path, IDENTITY)
    other = dataclasses.replace(IDENTITY, fingerprint="other")
    says = "process-7 was flushed by a job of other flags"
    with StoreDirectory(shared_memory, other, 0) as own, pytest.raises(UserError, match=says):
        adopt_store(own, OWNER, [folder])
    assert (folder / "process-7" / "journal").exists()


def test_a_flush_that_was_cut_short_is_nothing(shared_memory, tmp_path, monkeypatch):
    leave(shared_memory, 7, step=8)
    monkeypatch.setattr(flushing, "_sync", cut)
    with pytest.raises(OSError, match="cut"):
        flush(shared_memory, 7, tmp_path)
    shutil.rmtree(shared_memory / IDENTITY.run_id)
    with opened(shared_memory, 0) as own:
        assert adopt_store(own, OWNER, [flushed_folder(tmp_path, IDENTITY)]) is None
    assert list(flushed_folder(tmp_path, IDENTITY).iterdir()) == []


def cut(folder):
    raise OSError("cut")


def test_what_did_not_come_back_whole_does_not_count(shared_memory, tmp_path, flushed, monkeypatch):
    folder = flushed_folder(tmp_path, IDENTITY)
    written = []
    monkeypatch.setattr(os, "fsync", lambda _: written.append(1) or (len(written) < 2 or cut("")))
    with opened(shared_memory, 0) as own, pytest.raises(UserError, match="can't bring"):
        adopt_store(own, OWNER, [folder])
    monkeypatch.undo()
    with opened(shared_memory, 0) as own:
        assert own.open_journal() is None
        assert adopt_store(own, OWNER, [folder]) == 7
        assert own.open_ring(RingRole.OWN, OWNER).records() == (flushed,)


def test_the_journal_comes_last(shared_memory, tmp_path, flushed, monkeypatch):
    order = []
    monkeypatch.setattr(flushing, "_copy", lambda source, target: order.append(source.name))
    with pytest.raises(FileNotFoundError):
        bring_back(flushed_folder(tmp_path, IDENTITY) / "process-7", tmp_path)
    assert order[0] != "journal"
