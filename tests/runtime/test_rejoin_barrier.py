# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for those that replay leave the job's store alone meanwhile."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_moevement.runtime.coordination.rejoin_barrier import (
    RejoinBarrier,
    RejoinBarrierError,
)
from tests.harness.one_of_many import one_of_many

ARRIVED, EVERYBODY = "meeting/arrived", "meeting/everybody"


class CountingStore:
    """Notes what is asked of a store, and calls an action when somebody begins to wait."""

    def __init__(self, store, on_wait):
        self._store, self._on_wait = store, on_wait
        self.asked = []

    def __getattr__(self, name):
        self.asked.append(name)
        if name == "wait":
            self._on_wait()
        return getattr(self._store, name)


def test_a_rank_that_waits_asks_no_more_until_the_others_come(monkeypatch):
    store = dist.HashStore()

    def come():
        threading.Timer(0.05, lambda: store.set(EVERYBODY, "")).start()

    counting = CountingStore(store, come)
    with one_of_many(2, 0):
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: counting)
        RejoinBarrier("meeting", timedelta(seconds=20)).wait()
    assert counting.asked[:3] == ["add", "add", "wait"]
    assert len(counting.asked) == counting.asked.count("wait") * 2 + 1  # progress, after a slice


def test_who_comes_last_lets_all_go(monkeypatch):
    store = dist.HashStore()
    store.add(ARRIVED, 1)
    with one_of_many(2, 0):
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        RejoinBarrier("meeting", timedelta(seconds=20)).wait()
    assert store.check([EVERYBODY])


def test_nobody_waits_for_ever_where_nobody_makes_progress(monkeypatch):
    store = dist.HashStore()
    with one_of_many(2, 0):
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        with pytest.raises(RejoinBarrierError, match="did not come back for 0 s"):
            RejoinBarrier("meeting", timedelta(seconds=0.3)).wait()
