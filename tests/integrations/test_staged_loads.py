# SPDX-License-Identifier: Apache-2.0
"""Loading a slot casts on the device, from pinned memory, piece by piece."""

import contextlib
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moevement.backends import staging
from megatron_moevement.backends.staging import Staging, pieces
from megatron_moevement.policy.job.state_recipe import Content

PIECE_BYTES = 4000


class Casts(TorchDispatchMode):
    """Notes casts on the host, copies between devices into another type, and new device memory."""

    def __init__(self):
        super().__init__()
        self.wrong = []
        self.together = []
        self.made_bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name()
        copied = {
            "aten::copy_": lambda: [(args[1], args[0])],
            "aten::_foreach_copy_": lambda: zip(args[1], args[0], strict=True),
            "aten::_to_copy": lambda: [(args[0], result)],
        }
        if name == "aten::_foreach_copy_":
            self.together.append(len(args[0]))
        for source, target in copied.get(name, list)():
            if source.dtype is not target.dtype and (source.is_cpu or target.is_cpu):
                self.wrong.append(f"{source.device} {source.dtype} to {target.device}")
        if name in ("aten::new_empty", "aten::_to_copy", "aten::clone") and not result.is_cpu:
            self.made_bytes.append(result.nbytes)
        return result


@pytest.mark.parametrize(("source", "target"), [("cpu", "meta"), ("cuda", "cpu")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cast_between_host_and_device_runs_on_the_device(monkeypatch, source, target, dtype):
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE_BYTES)
    # The method looks for the device before anybody can tell that there is none.
    monkeypatch.setattr(torch.Tensor, "copy_", partialmethod(torch.ops.aten.copy_.default))
    # Without a GPU, a fake tensor can be copied from one, and a tensor of no device to one.
    fake = FakeTensorMode() if source == "cuda" else contextlib.nullcontext()
    with fake, Casts() as casts:
        staged = Staging()
        for size in (100, 1250, 50, 1250):
            from_here = torch.empty(size, 2, device=source, dtype=torch.bfloat16)
            to_there = torch.empty(size, 2, device=target, dtype=dtype)
            for piece in pieces([from_here], [to_there]):
                staged.copy(*piece)
    assert casts.wrong == []
    item_bytes = (from_here if source == "cpu" else to_there).itemsize
    sizes = [] if dtype is torch.bfloat16 else [200, PIECE_BYTES // to_there.itemsize]
    assert casts.made_bytes == [item_bytes * size for size in sizes]


def test_tensors_of_one_type_go_through_together_and_no_more_than_fit(monkeypatch):
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE_BYTES)
    sizes = [(400, torch.bfloat16), (600, torch.bfloat16), (1, torch.bfloat16), (7, torch.float16)]
    sources = [torch.empty(size, dtype=dtype) for size, dtype in sizes]
    targets = [torch.empty(size, device="meta") for size, _ in sizes]
    staged = Staging()
    with Casts() as casts:
        for piece in pieces(sources, targets):
            staged.copy(*piece)
    assert casts.wrong == []
    assert casts.made_bytes == [2 * (400 + 600)]
    assert casts.together == [2, 2, 1, 1, 1, 1]  # to the device, then there


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_all_of_the_copies_in_their_order_and_none_is_larger(monkeypatch, seed):
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE_BYTES)
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 3000, (30,), generator=random).tolist()
    sources = [torch.randn(size, generator=random) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    found = []
    for piece in pieces(sources, targets):
        assert sum(target.nbytes for target in piece[1]) <= PIECE_BYTES
        found += piece[0]
        Staging().copy(*piece)
    assert torch.equal(torch.cat(found), torch.cat(sources))
    assert torch.equal(torch.cat(targets), torch.cat(sources).double())


def test_what_is_not_contiguous_is_a_piece_of_its_own():
    source, target = torch.randn(7, 3), torch.zeros(7, 3)
    (piece,) = pieces([source.t()], [target.t()])
    Staging().copy(*piece)
    assert torch.equal(target, source)


def test_on_the_host_it_is_a_copy():
    source = torch.randn(7, 3).bfloat16()
    target = torch.zeros(7, 3)
    Staging().copy([source], [target])
    assert torch.equal(target, source.float())
    Staging().copy([source.t()], [target.t()])
    assert torch.equal(target, source.float())


def test_what_is_put_back_is_cast_on_the_device():
    from megatron_moevement.integrations.megatron.snapshots import (  # noqa: PLC0415
        LiveOperators,
        Piece,
    )

    master = Piece("master", torch.empty(5, 3, device="meta"), torch.bfloat16)
    operators = SimpleNamespace(pieces=lambda operator, content: (master, master))
    with Casts() as casts:
        LiveOperators.put_back(
            operators, None, Content.COMPUTE, [torch.ones(15, dtype=torch.bfloat16)] * 2
        )
    assert casts.wrong == []
    assert casts.made_bytes == [2 * 15 * 2]  # both at once
