# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Core finds in place of `torch.cuda` when it computes on the host.

Only the names that Megatron-Core's training path uses are here. Any other raises `HostBackendError`
with its name: a call that silently did nothing would be found much later, as a wrong number.
Work on the host is synchronous, so streams and events order nothing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from megatron_moevement.errors import MoEvementError

HOST = torch.device("cpu")

FloatTensor = torch.FloatTensor
HalfTensor = torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor
OutOfMemoryError = torch.OutOfMemoryError


class HostBackendError(MoEvementError, NotImplementedError):
    """Megatron-Core asked for something of `torch.cuda` that the host does not stand in for."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise HostBackendError(
        f"torch.cuda.{name} has no counterpart on the cpu backend: "
        "this feature of Megatron-Core needs a GPU"
    )


def _nothing(*_: object, **__: object) -> None:
    """Does nothing: the host computes synchronously, is the only device and keeps no cache."""


class Event:
    """A point in the (synchronous) past of the host."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._enable_timing = enable_timing
        self._time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Notes the time; all work before it has been done."""
        del stream
        self._time_s = time.perf_counter()

    wait = synchronize = _nothing

    def query(self) -> bool:
        """Returns True: all work before the event has been done."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds from this event to `end`."""
        return (end._time_s - self._time_s) * 1e3


class Stream:
    """The one order in which the host computes."""

    def __init__(self, *_: object, **__: object) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def query(self) -> bool:
        """Returns True: nothing is pending."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Records and returns an event."""
        event = event or Event()
        event.record(self)
        return event


_STREAM = Stream()


def current_stream(device: object = None) -> Stream:
    """Returns the host's only stream."""
    del device
    return _STREAM


default_stream = current_stream


@contextlib.contextmanager
def stream(*_: object, **__: object) -> Iterator[None]:
    """Enters a stream, a device or a range: the host has only one."""
    yield


device = stream


def current_device() -> torch.device:
    """Returns the host, as a device that factories and `.to()` accept."""
    return HOST


def device_count() -> int:
    """Returns 1: a process computes on one host."""
    return 1


def is_available() -> bool:
    """Returns False: there is no GPU, whatever stands in for it."""
    return False


synchronize = set_device = empty_cache = _lazy_init = _nothing


def is_current_stream_capturing() -> bool:
    """Returns False: the host captures no graphs."""
    return False


def is_initialized() -> bool:
    """Returns True: the host needs no initialisation."""
    return True


def _lazy_call(callback: Callable[[], None]) -> None:
    callback()


default_generators: Mapping[object, torch.Generator] = collections.defaultdict(
    lambda: torch.default_generator
)
"""The default generator of every device, which is always the host's."""


def get_rng_state(device: object = None) -> torch.Tensor:
    """Returns the state of the host's default generator."""
    del device
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    """Sets the state of the host's default generator."""
    del device
    torch.default_generator.set_state(new_state)


manual_seed = torch.default_generator.manual_seed
initial_seed = torch.default_generator.initial_seed
random = SimpleNamespace(
    get_rng_state=get_rng_state,
    set_rng_state=set_rng_state,
    manual_seed=manual_seed,
    initial_seed=initial_seed,
)
amp = SimpleNamespace(
    custom_fwd=functools.partial(torch.amp.custom_fwd, device_type="cpu"),
    custom_bwd=functools.partial(torch.amp.custom_bwd, device_type="cpu"),
)
nvtx = SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=stream)
