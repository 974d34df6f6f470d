# SPDX-License-Identifier: Apache-2.0
"""The upstream log of one rank: the boundary tensors that it sent, in host memory.

Each retained step has a buffer of its own, step k the buffer k modulo their number. All bytes are
there from the start; nothing is allocated while training. A tensor is in the log once its copy has
landed and its hash is known; a step counts when all of its tensors are.

The receiver's side is here, too: a hash of every boundary tensor that came in, for as long as a
replay may send that tensor again.

Source: section 3.3 of the paper, upstream logging and stale log cleanup.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import weakref
from collections.abc import Callable, Mapping

import torch
import xxhash

from megatron_moevement.backends.backend import Pin
from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.facts.facts import LogExtent
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.slots.hashed_bytes import HASHED

_ALIGNMENT_BYTES = 64


class NotLoggedError(MoEvementError, LookupError):
    """The log does not have that tensor."""


class DamagedLogError(MoEvementError, RuntimeError):
    """A logged tensor does not read as it was logged."""


class LogFullError(MoEvementError, RuntimeError):
    """More steps are retained than the log has buffers for."""


class LogOrderError(MoEvementError, RuntimeError):
    """The log was written in a way that would give one name to two tensors."""


def tensor_hash(tensor: torch.Tensor) -> int:
    """Returns the hash of a tensor in host memory: bytes, type and shape."""
    seed = xxhash.xxh3_64_intdigest(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    return xxhash.xxh3_64_intdigest(tensor_bytes(tensor), seed=seed)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor in host memory, in place where it is contiguous."""
    data: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def padded_bytes(tensor_bytes: int) -> int:
    """Returns what a tensor takes up in the log."""
    return -(-tensor_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True)
class LoggedTensor:
    """One tensor of the log.

    Attributes:
        data: the tensor, in the log's memory.
    """

    tag: BoundaryTag
    data: torch.Tensor
    hash: int

    @property
    def is_intact(self) -> bool:
        """Whether it reads as it was logged."""
        HASHED.add(self.data.nbytes)
        return tensor_hash(self.data) == self.hash


@dataclasses.dataclass
class _LoggedStep:
    """One step, while it is written and after.

    Attributes:
        places: where its tensors go; those that have landed are in `tensors`, too.
        ended: nothing is added any more.
        too_large: a tensor did not fit; the step can't be served.
        damaged: tensors that were found not to read as they were logged.
    """

    used_bytes: int = 0
    places: dict[BoundaryTag, torch.Tensor] = dataclasses.field(default_factory=dict)
    tensors: dict[BoundaryTag, LoggedTensor] = dataclasses.field(default_factory=dict)
    received: dict[BoundaryTag, int] = dataclasses.field(default_factory=dict)
    ended: bool = False
    too_large: bool = False
    damaged: frozenset[BoundaryTag] = frozenset()

    @property
    def is_whole(self) -> bool:
        return self.ended and not self.too_large and len(self.tensors) == len(self.places)


class LogMemory:
    """Host memory for a log, all of it there and pinned before it is known whose log it will be."""

    def __init__(self, size_bytes: int, pin: Pin | None = None) -> None:
        """Allocates it.

        Args:
            pin: makes it a target of asynchronous copies, until `close`.
        """
        self.data = _host_memory(size_bytes)
        self._unpin: Callable[[], object] = lambda: None
        if pin is not None and size_bytes:
            self._unpin = finalizer = weakref.finalize(self, pin(self.data))
            finalizer.atexit = False

    def close(self) -> None:
        """Unpins it; it goes with the last tensor in it."""
        self._unpin()


class UpstreamLog:
    """What one rank sent over its stage boundaries, and hashes of what it received.

    It holds no thread and no process group, and outlives a generation. The training thread begins,
    ends and drops steps; whoever copies lands tensors.
    """

    def __init__(
        self,
        *,
        max_steps: int,
        step_bytes: int,
        pin: Pin | None = None,
        reserve: LogMemory | None = None,
    ) -> None:
        """Allocates all memory.

        Args:
            max_steps: steps that are retained at most; `max_log_steps` of the policy says it.
            step_bytes: bytes of a step, each tensor's rounded up by `padded_bytes`.
            pin: makes the memory a target of asynchronous copies, until `close`.
            reserve: memory that is there already; it is used where it is large enough.

        Raises:
            ValueError: there is no room for a single step.
        """
        if max_steps < 1:
            raise ValueError(f"an upstream log of {max_steps} steps can hold none; give 1 or more")
        self._max_steps = max_steps
        self._buffer_bytes = buffer_bytes(step_bytes)
        if reserve is None or reserve.data.nbytes < self.capacity_bytes:
            reserve = LogMemory(self.capacity_bytes, pin)
        self._memory = reserve
        self._steps: dict[int, _LoggedStep] = {}
        self._directions: frozenset[Direction] = frozenset()
        self._is_doubted = False
        """Whether damage was found since all was read last: then nothing counts unread."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes of host memory that the log takes, used or not."""
        return self._max_steps * self._buffer_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the retained steps' tensors."""
        return sum(step.used_bytes for step in self._steps.values())

    @property
    def steps(self) -> tuple[int, ...]:
        """The retained steps, ascending, whole or not."""
        return tuple(sorted(self._steps))

    def begin_step(self, step: int) -> None:
        """Opens a step; what was logged under its number before is forgotten.

        An interrupted step is run again, and a replayed one is logged again.

        Raises:
            LogFullError: its buffer holds a step that was not dropped yet.
        """
        holder = next((old for old in self._steps if (old - step) % self._max_steps == 0), step)
        if holder != step:
            raise LogFullError(
                f"step {step} has no room in the upstream log: it retains {self._max_steps} steps, "
                f"and step {holder} was not dropped; no window was persisted for so long"
            )
        self._steps[step] = _LoggedStep()

    def reserve(self, tag: BoundaryTag, like: torch.Tensor) -> torch.Tensor | None:
        """Returns the memory for a tensor of an open step; None when the step's buffer is full.

        Args:
            like: gives shape and type.

        Raises:
            LogOrderError: the step is not open, or has a tensor of that name.
        """
        step = self._open_step(tag.step)
        if tag in step.places:
            raise LogOrderError(f"{tag} is logged twice: the schedule's order is not understood")
        size_bytes = like.nbytes
        if step.used_bytes + padded_bytes(size_bytes) > self._buffer_bytes:
            step.too_large = True
            return None
        start = (tag.step % self._max_steps) * self._buffer_bytes + step.used_bytes
        place = self._memory.data[start : start + size_bytes].view(like.dtype).view(like.shape)
        step.used_bytes += padded_bytes(size_bytes)
        step.places[tag] = place
        return place

    def land(self, tag: BoundaryTag, place: torch.Tensor) -> None:
        """Notes that a tensor's bytes are in the memory that was reserved for it.

        A tensor that lands after its step was begun anew belongs to nobody.
        """
        step = self._steps.get(tag.step)
        if step is not None and step.places.get(tag) is place:
            step.tensors[tag] = LoggedTensor(tag, place, tensor_hash(place))

    def note_received(self, tag: BoundaryTag, received_hash: int) -> None:
        """Keeps the hash of a boundary tensor that came in."""
        step = self._steps.get(tag.step)
        if step is not None:
            step.received[tag] = received_hash

    def end_step(self, step: int) -> None:
        """Closes a step: everything that it sends was handed over.

        Raises:
            LogOrderError: the step is not open.
        """
        closed = self._open_step(step)
        self._directions |= {tag.direction for tag in closed.places}
        closed.ended = True

    def drop_before(self, step: int) -> None:
        """Drops all steps before this one; `Retention.oldest_log_step` says which."""
        self._steps = {number: kept for number, kept in self._steps.items() if number >= step}

    def clear(self) -> None:
        """Drops everything: after a rollback nothing of it is true any more."""
        self._steps = {}

    def close(self) -> None:
        """Drops everything, and lets go of its memory."""
        self.clear()
        self._memory.close()

    def extents(self) -> tuple[LogExtent, ...]:
        """Returns which steps can be served, for a process's facts.

        Tensors were hashed when they landed, and are again when they are served: the whole log is
        read once for what was found in it.
        """
        intact: dict[Direction, set[int]] = {direction: set() for direction in self._directions}
        for number, step in self._steps.items():
            if self._is_doubted:
                step.damaged |= {tag for tag, each in step.tensors.items() if not each.is_intact}
            damaged = {tag.direction for tag in step.damaged}
            for direction in intact.keys() - damaged if step.is_whole else ():
                intact[direction].add(number)
        self._is_doubted = False
        return tuple(
            LogExtent(direction, frozenset(steps))
            for direction, steps in sorted(intact.items(), key=lambda item: item[0].value)
        )

    def sent(self, step: int) -> Mapping[BoundaryTag, LoggedTensor]:
        """Returns the tensors of a step that are in the log."""
        return dict(self._steps[step].tensors) if step in self._steps else {}

    def logged_hash(self, tag: BoundaryTag) -> int:
        """Returns the hash that a tensor was logged with.

        Raises:
            NotLoggedError: it is not in the log.
        """
        tensor = self.sent(tag.step).get(tag)
        if tensor is None:
            raise NotLoggedError(f"{tag} is not in the upstream log")
        return tensor.hash

    def received(self, step: int) -> Mapping[BoundaryTag, int]:
        """Returns the hashes of what came in during a step."""
        return dict(self._steps[step].received) if step in self._steps else {}

    def serve(self, tag: BoundaryTag) -> torch.Tensor:
        """Returns a logged tensor, in the log's memory: copy it before the step is dropped.

        Raises:
            NotLoggedError: it is not in the log.
            DamagedLogError: it does not read as it was logged.
        """
        tensor = self.sent(tag.step).get(tag)
        if tensor is None:
            kept = f"{self.steps[0]} to {self.steps[-1]}" if self.steps else "none"
            raise NotLoggedError(f"{tag} is not in the upstream log; its steps: {kept}")
        if not tensor.is_intact:
            self._note_damage(tag)
            raise DamagedLogError(
                f"{tag} does not read as it was logged; its stage must join the replay"
            )
        return tensor.data

    def _note_damage(self, tag: BoundaryTag) -> None:
        step = self._steps.get(tag.step)
        if step is not None and tag not in step.damaged:  # it is in doubt once for each of them
            step.damaged |= {tag}
            self._is_doubted = True

    def _open_step(self, number: int) -> _LoggedStep:
        step = self._steps.get(number)
        if step is None or step.ended:
            state = "was never begun" if step is None else "is over"
            raise LogOrderError(f"step {number} {state}: nothing can be logged under it")
        return step


def buffer_bytes(step_bytes: int) -> int:
    """Returns the host memory that a log takes for each step that it retains."""
    return -(-step_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def step_bytes(tensors: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the bytes of a step that sends so many tensors of one shape."""
    return tensors * padded_bytes(math.prod(shape) * dtype.itemsize)


def _host_memory(size_bytes: int) -> torch.Tensor:
    """Returns bytes that begin on a page and are all backed by memory already.

    A fork would copy them: pinned pages at once, the others when one of both writes.
    """
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = mmap.mmap(-1, size_bytes, flags=flags)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)
