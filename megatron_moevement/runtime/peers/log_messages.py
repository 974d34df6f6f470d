# SPDX-License-Identifier: Apache-2.0
"""What messages about logged boundary tensors say: which tensor, of what type, with which hash."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.runtime.transport.wire import ProtocolError

_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}
"""What crosses stage boundaries; nothing else is allocated for a peer."""
_HASH_DIGITS = 16
_MAX_DIMENSIONS = 8
_TAG_NUMBERS = ("step", "sender", "receiver", "micro_batch")


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """What goes in front of a logged tensor's bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def document(self) -> dict[str, Any]:
        """Returns the header as JSON holds it."""
        name = str(self.dtype).removeprefix("torch.")
        return {"dtype": name, "shape": list(self.shape), "hash": _hex(self.hash)}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> TensorHeader:
        """Returns the header of a tensor that arrives.

        Raises:
            ProtocolError: it describes no tensor that crosses a boundary.
        """
        shape, dtype = document.get("shape"), _TYPES.get(str(document.get("dtype")))
        is_shape = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS
        if dtype is None or not is_shape or not all(map(_is_count, shape or ())):
            raise ProtocolError(f"no boundary tensor: {str(document)[:80]}")
        return cls(dtype, tuple(shape or ()), _of_hex(document.get("hash")))


def tag_document(tag: BoundaryTag) -> dict[str, Any]:
    """Returns the name of a boundary tensor as JSON holds it."""
    numbers = {name: getattr(tag, name) for name in _TAG_NUMBERS}
    return {**numbers, "direction": tag.direction.value}


def tag_of_document(document: Mapping[str, Any]) -> BoundaryTag:
    """Returns the name that `tag_document` wrote.

    Raises:
        ProtocolError: it names no boundary tensor.
    """
    numbers = {name: document.get(name) for name in _TAG_NUMBERS}
    ways = {way.value: way for way in Direction}
    way = document.get("direction")
    if not isinstance(way, str) or way not in ways or not all(map(_is_count, numbers.values())):
        raise ProtocolError(f"no name of a boundary tensor: {str(document)[:80]}")
    return BoundaryTag(direction=ways[way], **{name: int(str(n)) for name, n in numbers.items()})


def step_document(step: int) -> dict[str, Any]:
    """Returns what asks for the hashes of a step."""
    return {"step": step}


def step_of_document(document: Mapping[str, Any]) -> int:
    """Returns the step that is asked for.

    Raises:
        ProtocolError: none is.
    """
    step = document.get("step")
    if not _is_count(step):
        raise ProtocolError(f"no step: {step!r}")
    return int(str(step))


def hashes_document(hashes: Mapping[BoundaryTag, int]) -> dict[str, Any]:
    """Returns hashes of boundary tensors as JSON holds them."""
    return {"hashes": [[tag_document(tag), _hex(one)] for tag, one in hashes.items()]}


def hashes_of_document(document: Mapping[str, Any]) -> dict[BoundaryTag, int]:
    """Returns the hashes that `hashes_document` wrote.

    Raises:
        ProtocolError: these are none.
    """
    pairs = document.get("hashes")
    if not isinstance(pairs, list):
        raise ProtocolError("no hashes")
    try:
        return {tag_of_document(tag): _of_hex(one) for tag, one in pairs}
    except (AttributeError, TypeError, ValueError) as error:
        raise ProtocolError(f"no hashes: {error}") from error


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**48


def _hex(number: int) -> str:
    return f"{number:0{_HASH_DIGITS}x}"


def _of_hex(text: object) -> int:
    if not isinstance(text, str) or len(text) != _HASH_DIGITS:
        raise ProtocolError(f"no hash: {text!r}")
    try:
        return int(text, 16)
    except ValueError as error:
        raise ProtocolError(f"no hash: {text!r}") from error
