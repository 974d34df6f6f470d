"""Which files a process leaves behind at its end."""

import contextlib
import itertools
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_moevement.runtime.slots.identity import StoreIdentity
from megatron_moevement.runtime.slots.store import JournalShape, StoreDirectory
from megatron_moevement.strategies.kept_store import KeptStore

IDENTITY = StoreIdentity("run", "0123")
SHAPE = JournalShape(retained_steps=6, entry_bytes=100, last_step=20)


@pytest.mark.parametrize(
    ("ending", "is_left"),
    [((), True), (("finish",), False), (("finish", "keep"), True), (("finish", "stay"), True)],
)
def test_the_files_of_a_process_that_stops_after_all_stay(tmp_path, ending, is_left):
    kept = KeptStore()
    store = kept.open(tmp_path, IDENTITY, 0, None)
    store.journal(SHAPE)
    for step in ending:
        getattr(kept, step)()
    kept.close()
    assert store.folder.exists() == is_left


def test_who_gives_up_waits_for_the_lock_of_a_process_that_is_just_ending(tmp_path):
    kept = KeptStore()
    kept.open(tmp_path, IDENTITY, 0, None)
    dying = StoreDirectory(tmp_path, IDENTITY, 1)
    dying.journal(SHAPE)
    end = threading.Timer(0.3, dying.close)
    end.start()
    kept.abandon(timedelta(seconds=20))
    end.join()
    assert list(tmp_path.iterdir()) == []


def test_it_does_not_wait_for_ever_and_takes_nothing_from_the_living(tmp_path):
    kept = KeptStore()
    own = kept.open(tmp_path, IDENTITY, 0, None).folder
    with StoreDirectory(tmp_path, IDENTITY, 1) as living:
        kept.abandon(timedelta(seconds=0.1))
        assert (own.exists(), living.folder.exists()) == (False, True)


@pytest.mark.parametrize("how", ["flush", "finish"])
def test_an_ending_that_ctrl_c_cuts_short_anywhere_leaves_nothing_in_memory(
    tmp_path, monkeypatch, how
):
    for removed in range(1, 100):
        kept = KeptStore()
        kept.open(tmp_path / "memory", IDENTITY, 0, None).journal(SHAPE)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "unlink", interrupted_at(removed))
            end(kept, how, tmp_path)
            break
        kept.abandon(timedelta(0))
        assert list((tmp_path / "memory").iterdir()) == []
    assert removed == 3  # the journal and the lock


def end(kept, how, save):
    if how == "flush":
        kept.flush(save)
    else:
        kept.finish()
        kept.close()


def interrupted_at(removed):
    """Returns a removal of files that the nth one cuts short."""
    remove, calls = Path.unlink, itertools.count(1)

    def remove_or_stop(path, **kwargs):
        if next(calls) == removed:
            raise KeyboardInterrupt
        remove(path, **kwargs)

    return remove_or_stop
