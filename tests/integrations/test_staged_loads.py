"""Loading a slot casts on the device, from pinned memory, piece by piece."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moevement.backends import staging
from megatron_moevement.backends.staging import copy_staged
from megatron_moevement.policy.job.state_recipe import Content

PIECE = 1000


class Casts(TorchDispatchMode):
    """Notes casts on the host, copies between devices into another type, and the largest piece."""

    def __init__(self):
        super().__init__()
        self.wrong = []
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if name in ("aten::copy_", "aten::_to_copy"):
            source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], result)
            if source.dtype is not target.dtype and (source.is_cpu or target.is_cpu):
                self.wrong.append(f"{source.device} {source.dtype} to {target.device}")
            if name == "aten::_to_copy":
                self.largest = max(self.largest, target.numel())
        return result


@pytest.mark.parametrize(("source", "target"), [("cpu", "meta"), ("cuda", "cpu")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cast_between_host_and_device_runs_on_the_device(monkeypatch, source, target, dtype):
    monkeypatch.setattr(staging, "STAGING_ELEMENTS", PIECE)
    # Without a GPU, a fake tensor can be copied from one, and a tensor of no device to one.
    fake = FakeTensorMode() if source == "cuda" else contextlib.nullcontext()
    with fake, Casts() as casts:
        from_here = torch.empty(5 * PIECE // 4, 2, device=source, dtype=torch.bfloat16)
        to_there = torch.empty(5 * PIECE // 4, 2, device=target, dtype=dtype)
        copy_staged(from_here, to_there)
    assert casts.wrong == []
    assert casts.largest == (0 if dtype is torch.bfloat16 else PIECE)


def test_on_the_host_it_is_a_copy():
    source = torch.randn(7, 3).bfloat16()
    target = torch.zeros(7, 3)
    copy_staged(source, target)
    assert torch.equal(target, source.float())
    copy_staged(source.t(), target.t())
    assert torch.equal(target, source.float())


def test_what_is_put_back_is_cast_on_the_device():
    from megatron_moevement.integrations.megatron.snapshots import (  # noqa: PLC0415
        LiveOperators,
        Piece,
    )

    master = Piece("master", torch.empty(5, 3, device="meta"), torch.bfloat16)
    operators = SimpleNamespace(pieces=lambda operator, content: (master,))
    with Casts() as casts:
        LiveOperators.put_back(
            operators, None, Content.COMPUTE, [torch.ones(5, 3, dtype=torch.bfloat16)]
        )
    assert casts.wrong == []
    assert casts.largest == 15
