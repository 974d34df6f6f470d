# SPDX-License-Identifier: Apache-2.0
"""Staging: copies between a device and host memory into another type, cast on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

STAGING_ELEMENTS = 1 << 24
"""Of copies that are cast: so many at a time go through device memory."""

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
        """Copies on the current stream, the same in each call: it orders the uses of the memory.

        From a device to pinned memory, the copies are enqueued only.
        """
        pairs = list(zip(sources, targets, strict=True))
        as_they_are = [pair for pair in pairs if not _is_staged(*pair)]
        copy_each(*_columns(as_they_are))
        for piece in _pieces(pair for pair in pairs if _is_staged(*pair)):
            self._cast(*_columns(piece))

    def _cast(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies flat tensors of one type on each side, which fit into the memory together."""
        on_device, on_host = (
            (sources[0], targets[0]) if sources[0].is_cuda else (targets[0], sources[0])
        )
        sizes = [each.numel() for each in sources]
        room = self._room(on_device, sum(sizes) * on_host.itemsize).view(on_host.dtype)
        staged = room.split(sizes)  # type: ignore[no-untyped-call]
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


def _is_staged(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.dtype is not target.dtype and source.device != target.device


def _pieces(pairs: Iterator[_Pair]) -> Iterator[list[_Pair]]:
    """Yields pairs of flat tensors, of one type on each side, that fit into the memory together."""
    for _, alike in groupby(_flat(pairs), key=lambda pair: (pair[0].dtype, pair[1].dtype)):
        piece: list[_Pair] = []
        elements = 0
        for pair in alike:
            elements += pair[0].numel()
            if elements > STAGING_ELEMENTS and piece:
                yield piece
                piece, elements = [], pair[0].numel()
            piece.append(pair)
        yield piece


def _flat(pairs: Iterator[_Pair]) -> Iterator[_Pair]:
    for source, target in pairs:
        flat = source.contiguous().view(-1), target.view(-1)
        yield from zip(*(one.split(STAGING_ELEMENTS) for one in flat), strict=True)  # type: ignore[no-untyped-call]


def _columns(pairs: Sequence[_Pair]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [source for source, _ in pairs], [target for _, target in pairs]
