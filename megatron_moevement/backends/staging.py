# SPDX-License-Identifier: Apache-2.0
"""Staging: copies between a device and host memory into another type, cast on the device."""

from __future__ import annotations

import torch

STAGING_ELEMENTS = 1 << 24
"""Of a copy that is cast: so many at a time go through device memory."""


class Staging:
    """Device memory that casts go through; it is kept, and as large as the largest piece until now.

    torch would cast what goes to a device on the host, in one thread, and copy it from memory that
    is not pinned.
    """

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._memory: torch.Tensor | None = None

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies on the current stream, the same in each call: it orders the uses of the memory.

        From a device to pinned memory, the copy is enqueued only.
        """
        enqueue = source.is_cuda
        if source.dtype is target.dtype or source.device == target.device:
            target.copy_(source, non_blocking=enqueue)
            return
        on_device, on_host = (source, target) if enqueue else (target, source)
        pieces, places = (
            one.view(-1).split(STAGING_ELEMENTS)  # type: ignore[no-untyped-call]
            for one in (source.contiguous(), target)
        )
        for piece, place in zip(pieces, places, strict=True):
            room = self._room(on_device, piece.numel() * on_host.itemsize)
            staged = room.view(on_host.dtype)
            staged.copy_(piece)
            place.copy_(staged, non_blocking=enqueue)

    def _room(self, like: torch.Tensor, size_bytes: int) -> torch.Tensor:
        """Returns bytes on the device of a tensor."""
        if self._memory is None or self._memory.nbytes < size_bytes:
            self._memory = None  # before there is more
            self._memory = like.new_empty(size_bytes, dtype=torch.uint8)
        return self._memory.narrow(0, 0, size_bytes)
