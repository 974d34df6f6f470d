"""What messages about live state say: which part of S_k, and with which checksum it comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_moevement.runtime.transport.wire import ProtocolError

_MAX_STEP = 2**48


class OfferedState(Protocol):
    """The live state of a process while it stands still; the server's threads read it."""

    def read(self, step: int, name: str) -> memoryview:
        """Returns the bytes of a part of S_step.

        Raises:
            LookupError: the state is that of another step, or has no such part.
        """


@dataclasses.dataclass(frozen=True)
class StatePart:
    """A part of a live state.

    Attributes:
        step: k of the S_k that it is of.
        name: the operator whose state it is, or what else belongs to a rank.
    """

    step: int
    name: str

    def document(self) -> dict[str, Any]:
        """Returns what asks for the part."""
        return {"step": self.step, "part": self.name}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> StatePart:
        """Returns the part that is asked for.

        Raises:
            ProtocolError: none is.
        """
        step, name = document.get("step"), document.get("part")
        if type(step) is not int or not 0 <= step < _MAX_STEP or not isinstance(name, str):
            raise ProtocolError(f"no part of a state: {str(document)[:80]}")
        return cls(step, name)


def found_document(part: StatePart, checksum: int) -> dict[str, Any]:
    """Returns what goes in front of a part's bytes."""
    return {**part.document(), "checksum": f"{checksum:016x}"}


def checksum_of_document(document: Mapping[str, Any], part: StatePart) -> int:
    """Returns the checksum of a part that arrives.

    Raises:
        ProtocolError: it is another part, or has no checksum.
    """
    checksum = document.get("checksum")
    if StatePart.of_document(document) != part or not isinstance(checksum, str):
        raise ProtocolError(f"another part than {part}: {str(document)[:80]}")
    try:
        return int(checksum, 16)
    except ValueError as error:
        raise ProtocolError(f"no checksum: {checksum[:20]}") from error
