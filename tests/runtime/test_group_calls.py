"""What fails in a group of NCCL's calls closes it: the thread could send nothing any more."""

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.runtime.interrupts.group_calls import _closing_manager, close_calls
from tests.harness.nccl_like import calls

torch_manager = dist.distributed_c10d._coalescing_manager


class CallError(RuntimeError):
    """A call within a group fails, as all do after an abort."""


class Group:
    """A process group, as far as a batch of messages uses it."""

    _group_end = staticmethod(calls.end)

    def _start_coalescing(self, device):
        calls.begin()

    def _end_coalescing(self, device):
        calls.end()


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", Group, raising=False)
    group = Group()
    yield group
    dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)
    close_calls()
    assert calls.depth() == 0


def fail_within(manager, group):
    with pytest.raises(CallError), manager(group, torch.device("cpu"), async_ops=True):
        raise CallError


def test_torch_leaves_it_open(group):
    fail_within(torch_manager, group)
    assert calls.depth() == 1


def test_what_fails_closes_it(group):
    fail_within(_closing_manager, group)
    assert calls.depth() == 0


def test_what_succeeds_closes_it_once(group):
    with _closing_manager(group, torch.device("cpu"), async_ops=True):
        assert calls.depth() == 1
    assert calls.depth() == 0


def test_an_interrupt_before_anybody_could_close_it_is_made_good(group):
    for _ in range(3):
        group._start_coalescing(None)
    close_calls()
    assert calls.depth() == 0
