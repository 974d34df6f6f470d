# SPDX-License-Identifier: Apache-2.0
"""The probe measures with what a job sends its slots with, and says which copies don't come."""

import socket
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch

from megatron_moevement.backends.cpu import CpuBackend
from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.preflight.links import Holder, LinkTask, Load
from megatron_moevement.runtime.links import link_probe
from megatron_moevement.runtime.links.link_probe import LinkProbe
from megatron_moevement.runtime.transport.handshake import Session

TOKEN = b"a token of this test's processes"
DEADLINE = timedelta(seconds=20)
LOAD = Load(LogicalRank(), 300_001, 7)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr(link_probe, "_LONG_S", 0.0)


@pytest.fixture
def probe():
    """Returns what makes the probe of a process."""
    with ExitStack() as stack:

        def make(process, token=TOKEN):
            me = Session(token, process, 0)
            return stack.enter_context(LinkProbe("127.0.0.1", me, DEADLINE))

        yield make


def holder(process, probe):
    return Holder(process, *probe.address)


def measured(probe, task, folder):
    backend = CpuBackend()
    probe.prepare(task, folder, backend.pin)
    return probe.measure(task, backend.copy_stream(), CPU)


def test_copies_and_what_each_holder_gets_are_measured(probe, shared_memory):
    sender, *holders = (probe(process) for process in range(3))
    for each in holders:
        each.prepare(LinkTask(None, (), (LOAD,)), shared_memory, CpuBackend().pin)
    assert (
        list(shared_memory.iterdir()) == []
    )  # files without a name: whoever is killed leaves none
    task = LinkTask(LOAD, (holder(1, holders[0]), holder(2, holders[1])), ())
    report = measured(sender, task, shared_memory)
    assert report.to_host_bytes_per_s > 0
    assert [one.process for one in report.sent] == [1, 2]
    assert min(one.bytes_per_s for one in report.sent) > 0
    assert report.unsent == ()


def test_a_spare_takes_copies_and_sends_none(probe, shared_memory):
    report = measured(probe(0), LinkTask(None, (), (LOAD,)), shared_memory)
    assert (report.to_host_bytes_per_s, report.sent, report.unsent) == (None, (), ())


def test_a_rank_without_holders_measures_its_own_copies(probe, shared_memory):
    report = measured(probe(0), LinkTask(LOAD, (), ()), shared_memory)
    assert report.to_host_bytes_per_s > 0
    assert report.sent == ()


def test_who_is_not_reached_is_named_with_the_reason(probe, shared_memory):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    task = LinkTask(LOAD, (Holder(4, "127.0.0.1", port),), ())
    (unsent,) = measured(probe(0), task, shared_memory).unsent
    assert unsent.process == 4
    assert "refused" in unsent.reason


def test_who_has_another_token_gets_nothing(probe, shared_memory):
    other = probe(1, b"a token of another job's process")
    other.prepare(LinkTask(None, (), (LOAD,)), shared_memory, CpuBackend().pin)
    report = measured(probe(0), LinkTask(LOAD, (holder(1, other),), ()), shared_memory)
    assert (report.sent, [one.process for one in report.unsent]) == ((), [1])


def test_memory_that_is_not_there_is_refused(probe, tmp_path):
    huge = Load(LogicalRank(), 2**50, 1)
    with pytest.raises(UserError, match="bytes and its file system has"):
        probe(0).prepare(LinkTask(huge, (), ()), tmp_path, CpuBackend().pin)


def test_an_interface_of_another_machine_is_refused():
    with pytest.raises(UserError, match="--moevement-replication-interface 192"):
        LinkProbe("192.0.2.1", Session(TOKEN, 0, 0), DEADLINE)
