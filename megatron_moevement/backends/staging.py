"""Copies between a device and host memory into another type, cast on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STAGING_ELEMENTS = 1 << 24
"""Of a copy that is cast: as much device memory it takes at most."""


def copy_staged(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies on the current stream; from a device to pinned memory, it is enqueued only.

    torch would cast what goes to a device on the host, in one thread, and copy it from memory that
    is not pinned.
    """
    enqueue = source.is_cuda
    if source.dtype is target.dtype or source.device == target.device:
        target.copy_(source, non_blocking=enqueue)
        return
    pieces, places = (
        one.view(-1).split(STAGING_ELEMENTS)  # type: ignore[no-untyped-call]
        for one in (source.contiguous(), target)
    )
    for piece, place in zip(pieces, places, strict=True):
        staged = piece.to(place.dtype if enqueue else place.device)
        place.copy_(staged, non_blocking=enqueue)
