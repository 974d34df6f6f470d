# SPDX-License-Identifier: Apache-2.0
"""Which files a process leaves behind at its end."""

import contextlib
import itertools
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.faults.fault_points import NO_FAULTS
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.store_identity import RunIdentity, StoreIdentity
from megatron_moevement.runtime.stores.store import StoreDirectory
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.moevement.opening import _open_store
from megatron_moevement.strategies.moevement.protection import resident_store
from megatron_moevement.strategies.moevement.protection.resident_store import (
    ResidentStore,
    StoresOfRun,
)

IDENTITY = StoreIdentity("run", "0123")
SHAPE = JournalShape(retained_steps=6, entry_bytes=100, last_step=20)


@pytest.mark.parametrize(
    ("ending", "is_left"),
    [((), True), (("finish",), False), (("finish", "keep"), True), (("finish", "stay"), True)],
)
def test_the_files_of_a_process_that_stops_after_all_stay(tmp_path, ending, is_left):
    kept = ResidentStore()
    store = kept.open(tmp_path, IDENTITY, 0, None)
    store.journal(SHAPE)
    for step in ending:
        getattr(kept, step)()
    kept.close()
    assert store.folder.exists() == is_left


def test_a_process_waits_for_another_one_that_adopts_from_the_store_of_its_number(tmp_path):
    adopting = StoreDirectory(tmp_path, IDENTITY, 0)
    adopting.journal(SHAPE)
    moved = threading.Timer(0.3, adopting.close)
    moved.start()
    kept = ResidentStore()
    assert kept.open(tmp_path, IDENTITY, 0, LogicalRank()).folder == adopting.folder
    moved.join()
    kept.close()


def test_a_process_does_not_wait_for_ever_for_the_store_of_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(resident_store, "_PATIENCE_WITH_ADOPTERS", timedelta(seconds=0.1))
    with StoreDirectory(tmp_path, IDENTITY, 0), pytest.raises(UserError, match="is in use by"):
        ResidentStore().open(tmp_path, IDENTITY, 0, LogicalRank())


def test_who_gives_up_waits_for_the_lock_of_a_process_that_is_just_ending(tmp_path):
    kept = ResidentStore()
    kept.open(tmp_path, IDENTITY, 0, None)
    dying = StoreDirectory(tmp_path, IDENTITY, 1)
    dying.journal(SHAPE)
    end = threading.Timer(0.3, dying.close)
    end.start()
    kept.abandon(timedelta(seconds=20))
    end.join()
    assert list(tmp_path.iterdir()) == []


def test_who_finishes_removes_what_a_process_leaves_that_is_killed_at_its_end(tmp_path):
    kept = ResidentStore()
    kept.open(tmp_path, IDENTITY, 0, None)
    killed = StoreDirectory(tmp_path, IDENTITY, 1)
    killed.journal(SHAPE)
    end = threading.Timer(0.3, killed.close)
    end.start()
    kept.finish()
    kept.close()
    end.join()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_run_goes_where_others_have_removed_what_was_in_it(tmp_path):
    kept = ResidentStore()
    kept.open(tmp_path, IDENTITY, 0, None)
    lost = StoreDirectory(tmp_path, IDENTITY, 1)
    end = threading.Timer(0.3, lambda: shutil.rmtree(lost.folder))
    end.start()
    kept.finish()
    kept.close()
    end.join()
    lost.close()
    assert list(tmp_path.iterdir()) == []


def test_it_does_not_wait_for_ever_and_takes_nothing_from_the_living(tmp_path):
    kept = ResidentStore()
    own = kept.open(tmp_path, IDENTITY, 0, None).folder
    with StoreDirectory(tmp_path, IDENTITY, 1) as living:
        kept.abandon(timedelta(seconds=0.1))
        assert (own.exists(), living.folder.exists()) == (False, True)


@pytest.mark.parametrize("how", ["flush", "finish"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_ending_that_ctrl_c_cuts_short_anywhere_leaves_nothing_in_memory(
    tmp_path, monkeypatch, how, moment
):
    memory = tmp_path / "memory"
    for removal in itertools.count(1):
        leave(memory)
        kept = opened(memory)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "unlink", interrupted_at(removal, moment))
            end(kept, how, tmp_path)
            break
        kept.abandon(timedelta(0))
        assert list(memory.iterdir()) == []
    assert removal == (3 if how == "flush" else 5)  # a journal and a lock, twice at an end


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_a_restart_cuts_short_is_removed_later(tmp_path, monkeypatch, moment):
    for removal in (1, 2):
        leave(tmp_path)
        kept, run = opened(tmp_path), StoresOfRun(tmp_path, IDENTITY)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", interrupted_at(removal, moment))
            with pytest.raises(KeyboardInterrupt):
                run.remove_left_behind(run.left_behind())
        kept.keep()
        kept.finish()
        kept.close()
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_store_is_opened_leaves_nothing(tmp_path, monkeypatch):
    kept = ResidentStore()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", interrupted_at(1, "before", Path.glob))
        with pytest.raises(KeyboardInterrupt):
            kept.open(tmp_path, IDENTITY, 0, None)
    with StoreDirectory(tmp_path, IDENTITY, 0):  # nobody has it locked
        pass
    kept.abandon(timedelta(0))
    assert list(tmp_path.iterdir()) == []


def open_in_a_generation(root):
    """Opens a store as a job does; returns whether a restart waited while it was opened."""
    dist.init_process_group("gloo")
    seen = []

    class Watched(ResidentStore):
        def open(self, *args, **keywords):
            seen.append(protected.locked())
            return super().open(*args, **keywords)

    protected = threading.Lock()
    run = RunIdentity({"--lr": "1"}, {})
    trained = SimpleNamespace(
        process=0,
        rank=LogicalRank(),
        identity=run,
        device=torch.device("cpu"),
        faults=NO_FAULTS,
    )
    settings = FaultTolerance(moevement_store_dir=root)
    store, _ = _open_store(settings, trained, Watched(), Generation(0, lambda: protected), [])
    store.remove()
    return seen


@pytest.mark.distributed
def test_a_restart_waits_until_what_others_left_is_adopted(megatron_fork_server, tmp_path):
    results = megatron_fork_server.run(open_in_a_generation, world_size=1, args=[str(tmp_path)])
    assert results.check().values == ([True],)


def opened(memory):
    kept = ResidentStore()
    kept.open(memory, IDENTITY, 0, None).journal(SHAPE)
    return kept


def leave(memory):
    """Leaves the store of a process that died."""
    with StoreDirectory(memory, IDENTITY, 7) as store:
        store.journal(SHAPE)


def end(kept, how, save):
    if how == "flush":
        kept.flush(save)
    else:
        kept.finish()
        kept.close()


def interrupted_at(number, moment, act=Path.unlink):
    """Returns what does as `act`, but for an interrupt at its nth call."""
    calls = itertools.count(1)

    def act_or_stop(path, *args, **kwargs):
        is_now = next(calls) == number
        if is_now and moment == "before":
            raise KeyboardInterrupt
        done = act(path, *args, **kwargs)
        if is_now:
            raise KeyboardInterrupt
        return done

    return act_or_stop


def test_what_is_left_after_a_generation_began_stays(tmp_path):
    leave(tmp_path)
    kept, run = opened(tmp_path), StoresOfRun(tmp_path, IDENTITY)
    known = run.left_behind()
    assert known == (7,)
    with StoreDirectory(tmp_path, IDENTITY, 8) as dying:
        dying.journal(SHAPE)
    assert set(run.left_behind()) == {*known, 8}
    run.remove_left_behind(known)
    assert run.left_behind() == (8,)
    kept.finish()
    kept.close()
