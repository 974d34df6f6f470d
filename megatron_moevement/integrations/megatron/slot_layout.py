# SPDX-License-Identifier: Apache-2.0
"""Slot layout: where in a slot's host buffer the tensors of each operator lie on one rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

import torch

from megatron_moevement.integrations.megatron.snapshots import LiveOperators, Piece
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.policy.window.schedule import WindowSchedule

ALIGNMENT_BYTES = 64
"""Of every operator in a buffer: a cache line, and more than any type needs."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One operator's tensors in a slot: what one checksum covers.

    Attributes:
        pieces: its tensors, one behind the other.
    """

    operator: OperatorId
    content: Content
    offset: int
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.operator}:{self.content.value}"

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(piece.size_bytes for piece in self.pieces)

    def views(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields each tensor's elements as a view of a buffer of bytes."""
        offset = self.offset
        for dtype, run in self._runs:
            sizes = [piece.live.numel() for piece in run]
            end = offset + sum(sizes) * dtype.itemsize
            own = buffer[offset:end].view(dtype)
            for piece, place in zip(run, own.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                yield place if piece.elements.dim() == 1 else place.view(piece.live.shape)
            offset = end

    @cached_property
    def _runs(self) -> Sequence[tuple[torch.dtype, Sequence[Piece]]]:
        """Its tensors of one type after the other."""
        return [(dtype, list(run)) for dtype, run in groupby(self.pieces, lambda one: one.dtype)]

    def read(self, wanted: slice) -> memoryview:
        """Returns bytes of the tensors as they are now, one behind the other, in host memory."""
        start, stop, _ = wanted.indices(self.size_bytes)
        found = bytearray(max(stop - start, 0))
        begin = 0
        for piece in self.pieces:
            end = begin + piece.size_bytes
            first, last = max(start, begin), min(stop, end)
            if first < last:
                live = piece.live.detach().to(piece.dtype).reshape(-1).view(torch.uint8)
                place = torch.frombuffer(found, dtype=torch.uint8)[first - start : last - start]
                place.copy_(live[first - begin : last - begin])
            begin = end
        return memoryview(found)


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """What one rank captures in one slot of a window, and where it lies in the buffer."""

    parts: tuple[Part, ...]

    @property
    def captured_bytes(self) -> int:
        """Bytes of all tensors, without what alignment leaves between them."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer up to the end of the last tensor, aligned."""
        last = self.parts[-1] if self.parts else None
        return 0 if last is None else _aligned(last.offset + last.size_bytes)


def slot_layouts(
    schedule: WindowSchedule, rank: LogicalRank, live: LiveOperators
) -> tuple[SlotLayout, ...]:
    """Returns the layout of each slot of a rank's window."""
    own = [operator.id for operator in schedule.inventory.by_rank[rank]]
    layouts = []
    for slot in range(schedule.window):
        contents = {
            operator: content
            for content, captured in (
                (Content.FULL, schedule.full[slot]),
                (Content.COMPUTE, schedule.compute[slot]),
            )
            for operator in own
            if operator in captured
        }
        layouts.append(SlotLayout(tuple(_parts(contents, live))))
    return tuple(layouts)


def _parts(contents: dict[OperatorId, Content], live: LiveOperators) -> Iterator[Part]:
    offset = 0
    for operator, content in contents.items():
        part = Part(operator, content, offset, live.pieces(operator, content))
        offset = _aligned(offset + part.size_bytes)
        yield part


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
