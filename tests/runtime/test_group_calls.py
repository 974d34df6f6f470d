# SPDX-License-Identifier: Apache-2.0
"""What fails in a group of NCCL's calls closes it: the thread could send nothing any more."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from megatron_moevement.runtime.interrupts.group_calls import _closing_manager, close_calls
from tests.harness.nccl_like import calls
from tests.harness.nccl_like.abort import FOLDER_VARIABLE
from tests.harness.nccl_like.communicator import AbortedError
from tests.harness.nccl_like.group import NcclLikeGroup

torch_manager = dist.distributed_c10d._coalescing_manager
CPU = torch.device("cpu")


class CallError(RuntimeError):
    """A call within a group fails, as all do after an abort."""


@pytest.fixture
def group(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", NcclLikeGroup, raising=False)
    group = NcclLikeGroup(dist.HashStore(), 0, 1)
    yield group
    dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)
    calls.forget()


def fail_after(call=lambda: None):
    call()
    raise CallError


def fail_within(manager, group, call=lambda: None):
    with pytest.raises(CallError), manager(group, CPU, async_ops=True):
        fail_after(call)


def test_torch_leaves_it_open(group):
    fail_within(torch_manager, group)
    assert calls.depth() == 1


def test_what_fails_closes_it(group):
    fail_within(_closing_manager, group)
    assert calls.depth() == calls.counted() == 0


def test_what_succeeds_closes_it_once(group):
    with _closing_manager(group, CPU, async_ops=True):
        assert calls.depth() == 1
    assert calls.depth() == 0
    close_calls()


def test_what_an_interrupt_leaves_open_is_closed_when_torch_has_no_group_left(group, monkeypatch):
    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "_group_end", interrupted)
    with pytest.raises(KeyboardInterrupt), _closing_manager(group, CPU):
        fail_after(calls.begin)
    assert calls.depth() == 2
    close_calls()
    assert calls.depth() == 0


def test_torch_does_not_count_down_where_a_group_ends_with_an_error(group):
    def launch():
        raise AbortedError("of this test")

    fail_within(_closing_manager, group, lambda: calls.defer(launch))
    assert (calls.depth(), calls.counted()) == (0, 1)
    with pytest.raises(calls.NotOpenError):
        group.allreduce([torch.ones(1)])  # connects


def test_nothing_is_closed_where_nccl_carries_no_collectives(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", NcclLikeGroup, raising=False)
    group = dist.ProcessGroup(0, 1)
    other = FakeProcessGroup._create_internal(0, 1)  # as gloo's, it has no calls to close
    group._register_backend(CPU, dist.ProcessGroup.BackendType.CUSTOM, other)
    fail_within(_closing_manager, group)
    dist.distributed_c10d._world.pg_coalesce_state.pop(group)
    close_calls()
