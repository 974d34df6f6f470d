# SPDX-License-Identifier: Apache-2.0
"""Staging: copies between a device and host memory, in pieces, cast on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch

PIECE_BYTES = 16 << 20
"""So much is copied at a time: the computation's own copies to the host wait for no more."""

_Pair = tuple[torch.Tensor, torch.Tensor]


class Staging:
    """Device memory that casts go through; it is kept, and as large as the largest piece until now.

    torch would cast what goes to a device on the host, in one thread, and copy it from memory that
    is not pinned.
    """

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._memory: torch.Tensor | None = None

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies a piece on the current stream, the same in each call: it orders memory's uses.

        From a device to pinned memory, the copies are enqueued only.
        """
        pairs = zip(sources, targets, strict=True)
        for kind, alike in groupby(pairs, key=_cast_of):
            columns = _columns(alike)
            copy_each(*columns) if kind is None else self._cast(*columns)

    def _cast(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies tensors of one type on each side."""
        on_device, on_host = (targets, sources) if sources[0].is_cpu else (sources, targets)
        room = self._room(on_device[0], sum(each.nbytes for each in on_host))
        sizes = [each.numel() for each in on_host]
        parts = room.view(on_host[0].dtype).split(sizes)  # type: ignore[no-untyped-call]
        staged = [part.view(like.shape) for part, like in zip(parts, on_host, strict=True)]
        copy_each(sources, staged)
        copy_each(staged, targets)

    def _room(self, like: torch.Tensor, size_bytes: int) -> torch.Tensor:
        """Returns bytes on the device of a tensor."""
        if self._memory is None or self._memory.nbytes < size_bytes:
            self._memory = None  # before there is more
            self._memory = like.new_empty(size_bytes, dtype=torch.uint8)
        return self._memory.narrow(0, 0, size_bytes)


def copy_each(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copies tensors, in one call into torch; enqueues what leaves a device."""
    if sources:
        enqueue = sources[0].is_cuda
        torch._foreach_copy_(list(targets), list(sources), non_blocking=enqueue)


def pieces(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yields copies in pieces of `PIECE_BYTES`: small ones together, parts of large ones apart."""
    piece: list[_Pair] = []
    piece_bytes = 0
    for pair in _parts(sources, targets):
        size_bytes = pair[1].nbytes
        if piece and piece_bytes + size_bytes > PIECE_BYTES:
            yield _columns(piece)
            piece, piece_bytes = [], 0
        piece.append(pair)
        piece_bytes += size_bytes
    if piece:
        yield _columns(piece)


def _parts(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Iterator[_Pair]:
    for pair in zip(sources, targets, strict=True):
        if pair[1].nbytes <= PIECE_BYTES or not all(one.is_contiguous() for one in pair):
            yield pair
        else:
            elements = PIECE_BYTES // pair[1].itemsize
            parts = (one.view(-1).split(elements) for one in pair)  # type: ignore[no-untyped-call]
            yield from zip(*parts, strict=True)


def _cast_of(pair: _Pair) -> tuple[torch.dtype, torch.dtype] | None:
    """Returns the types of a copy that is cast between the host and a device."""
    source, target = pair
    is_cast = source.dtype is not target.dtype and source.device != target.device
    return (source.dtype, target.dtype) if is_cast else None


def _columns(pairs: Iterable[_Pair]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    sources, targets = zip(*pairs, strict=True)
    return list(sources), list(targets)
