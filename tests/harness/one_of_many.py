# SPDX-License-Identifier: Apache-2.0
"""A process group of many ranks of which this process is the only one that exists.

What the others send is given beforehand, in the order of the agreements: so what an agreement costs
one rank of thousands can be measured, and counted, on one core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
"""Torch does not say all of its types."""
Tensors = Sequence[torch.Tensor]
_NAME = "one_of_many"
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Values:
    """What all ranks give to one agreement, as JSON, or what one rank sends to all."""

    values: Sequence[Any]

    @cached_property
    def payloads(self) -> Sequence[bytes]:
        """The values as they travel."""
        return [json.dumps(value).encode() for value in self.values]

    @cached_property
    def _tensors(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def tensors(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what comes of all ranks first, and what is left; made once.

        Args:
            size: of what each rank sends first, with the length.
        """
        if size not in self._tensors:
            inline = size - _LENGTH_BYTES
            heads = (
                len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:inline].ljust(inline)
                for payload in self.payloads
            )
            rests = (payload[inline:] for payload in self.payloads)
            self._tensors[size] = _tensor(b"".join(heads)), _tensor(b"".join(rests))
        return self._tensors[size]


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0)


class _Done:
    """The work of a collective that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True


class OneOfMany(dist.ProcessGroup):  # type: ignore[misc]  # of a type that is not told
    """The group; `script` says what the others do next."""

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        """Begins without others that do anything."""
        super().__init__(rank, size)
        self._size = size
        self._script: list[Values] = []
        self._rest = torch.empty(0)
        self.received_bytes = 0
        """Of the collectives of the present script."""
        self.largest_bytes = 0
        """Of all collectives."""

    def script(self, *values: Values) -> None:
        """Begins anew with what the ranks give to the agreements and broadcasts that follow."""
        self._script = list(values)
        self.received_bytes = 0

    def _get_backend(self, device: torch.device) -> OneOfMany:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: there is no check of sequences."""

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Returns the name that torch uses."""
        return _NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> _Done:
        """Gives what all ranks send first to an agreement."""
        head, self._rest = self._script.pop(0).tensors(own.numel())
        return self._give(output, head)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Done:
        """Gives the rest of it; a reduction of anything else finds all ranks alike."""
        is_rest = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        return self._give(tensors[0], self._rest if is_rest else tensors[0])

    def broadcast(self, tensors: Tensors, opts: Any = None) -> _Done:
        """Gives what one rank sends, its beginning and its rest."""
        if self._rest.numel():
            rest, self._rest = self._rest, torch.empty(0)
            return self._give(tensors[0], rest)
        head, self._rest = self._script.pop(0).tensors(tensors[0].numel())
        return self._give(tensors[0], head)

    def _give(self, output: torch.Tensor, value: torch.Tensor) -> _Done:
        assert output.numel() == value.numel()
        self.received_bytes += output.numel()
        self.largest_bytes = max(self.largest_bytes, output.numel())
        if output is not value:
            output.copy_(value)
        if value is self._rest:
            self._rest = torch.empty(0)
        return _Done()


@contextlib.contextmanager
def one_of_many(ranks: int, rank: int) -> Iterator[OneOfMany]:
    """Makes this process one rank of many."""
    if _NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001  (it can be done only once)
        dist.Backend.register_backend(_NAME, OneOfMany, devices=["cpu"])
    store = dist.HashStore()
    dist.init_process_group(_NAME, store=store, rank=rank, world_size=ranks)
    try:
        group = dist.group.WORLD
        assert isinstance(group, OneOfMany)
        yield group
    finally:
        dist.destroy_process_group()
