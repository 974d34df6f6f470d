# SPDX-License-Identifier: Apache-2.0
"""What messages about live state say: which bytes of S_k, and with which checksum they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_moevement.runtime.transport.wire import ProtocolError

_MAX_NUMBER = 2**48


class OfferedState(Protocol):
    """The live state of a process while it stands still; the server's threads read it."""

    def read(self, step: int, part: str, wanted: slice = slice(None)) -> tuple[memoryview, int]:
        """Returns bytes of a part of S_step, and how many the part has.

        Raises:
            LookupError: the state is that of another step, or has no such part.
        """


@dataclasses.dataclass(frozen=True)
class StateRange:
    """Bytes of a live state that are asked for.

    Attributes:
        step: k of the S_k that they are of.
        part: the operator whose state it is, or what else belongs to a rank.
        start: offset of the first one in the part.
        size_bytes: how many, at most.
    """

    step: int
    part: str
    start: int
    size_bytes: int

    @property
    def bytes(self) -> slice:
        """Where in the part they are."""
        return slice(self.start, self.start + self.size_bytes)

    def document(self) -> dict[str, Any]:
        """Returns what asks for them."""
        return {"step": self.step, "part": self.part, "range": [self.start, self.size_bytes]}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> StateRange:
        """Returns what is asked for.

        Raises:
            ProtocolError: nothing is.
        """
        match document:
            case {"step": step, "part": str(part), "range": [start, size_bytes]} if all(
                type(number) is int and 0 <= number < _MAX_NUMBER
                for number in (step, start, size_bytes)
            ):
                return cls(step, part, start, size_bytes)
        raise ProtocolError(f"no part of a state: {str(document)[:80]}")


def found_document(found: StateRange, part_bytes: int, checksum: int) -> dict[str, Any]:
    """Returns what goes in front of the bytes.

    Args:
        part_bytes: of the whole part.
        checksum: of what was asked for.
    """
    return {**found.document(), "part_bytes": part_bytes, "checksum": f"{checksum:016x}"}


def found_of_document(document: Mapping[str, Any], wanted: StateRange) -> tuple[int, int]:
    """Returns how many bytes the part has that arrives, and the checksum of those that do.

    Raises:
        ProtocolError: they are others, or have no checksum.
    """
    part_bytes, checksum = document.get("part_bytes"), document.get("checksum")
    if StateRange.of_document(document) != wanted or not isinstance(checksum, str):
        raise ProtocolError(f"others than {wanted}: {str(document)[:80]}")
    if type(part_bytes) is not int or not 0 <= part_bytes < _MAX_NUMBER:
        raise ProtocolError(f"no size of a part: {part_bytes!r}")
    try:
        return part_bytes, int(checksum, 16)
    except ValueError as error:
        raise ProtocolError(f"no checksum: {checksum[:20]}") from error
