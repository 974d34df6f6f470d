# SPDX-License-Identifier: Apache-2.0
"""The order of an abort over NCCL, and that whoever waits is woken whatever fails."""

import sys
import types

import pytest

from megatron_moevement.integrations.nvrx import teardown
from megatron_moevement.integrations.nvrx.teardown import AbortCollectives
from megatron_moevement.runtime.coordination.generation import Interruption

STORE_PORT = 4321
BUFFERS = "transformer_engine.pytorch.module.base"


class TeardownError(Exception):
    """An abort fails on purpose."""


@pytest.fixture
def done(monkeypatch):
    """Notes what an abort does, in its order."""
    noted = []
    for name in ("AbortTorchDistributed", "AbortTransformerEngine"):
        monkeypatch.setattr(teardown, name, lambda name=name: lambda state: noted.append(name))
    monkeypatch.setattr(
        teardown,
        "shut_down_connections",
        lambda kept_ports, kept, only_ports: noted.append(only_ports),
    )
    return noted


def abort():
    AbortCollectives(STORE_PORT, Interruption())("state")


def test_collectives_are_aborted_before_buffers_that_wait_for_them_are_freed(done, monkeypatch):
    base = types.SimpleNamespace(_ub_communicators={"qkv": object()})
    monkeypatch.setitem(sys.modules, BUFFERS, base)
    abort()
    assert done == ["AbortTorchDistributed", "AbortTransformerEngine", {STORE_PORT}]


@pytest.mark.parametrize("buffers", [None, {}])
def test_without_buffers_nothing_of_transformer_engine_is_torn_down(done, monkeypatch, buffers):
    base = types.SimpleNamespace(_ub_communicators=buffers)
    monkeypatch.setitem(sys.modules, BUFFERS, base)
    abort()
    assert done == ["AbortTorchDistributed", {STORE_PORT}]


def test_who_waits_for_the_store_is_woken_although_an_abort_fails(done, monkeypatch):
    def fail(state):
        raise TeardownError

    monkeypatch.setattr(teardown, "AbortTorchDistributed", lambda: fail)
    with pytest.raises(TeardownError):
        abort()
    assert done == [{STORE_PORT}]
