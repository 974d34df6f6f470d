# SPDX-License-Identifier: Apache-2.0
"""Tensors of an operation in host memory, which is all that gloo sends and receives.

On a GPU they are copied on a stream of their own, behind what the thread that asks for the
operation has enqueued before. So several ranks may share a GPU, which NCCL refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Enqueued:
    """What a thread has enqueued on the device of some tensors; on the host nothing is left of it.

    Attributes:
        event: that has come when all of it has run.
    """

    event: torch.cuda.Event | None

    @classmethod
    def by_now(cls, tensors: Sequence[torch.Tensor]) -> Enqueued:
        """Notes what the calling thread has enqueued until now."""
        device = _gpu_of(tensors)
        if device is None:
            return cls(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def await_done(self) -> None:
        """Waits until it has run; any thread calls it."""
        if self.event is not None:
            self.event.synchronize()


@contextlib.contextmanager
def beside(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Runs what is enqueued within the block beside the computation, and waits for its end."""
    device = _gpu_of(tensors)
    if device is None:
        yield
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def _gpu_of(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    return next((each.device for each in tensors if each.is_cuda), None)
