# SPDX-License-Identifier: Apache-2.0
"""What messages about slots say: which slot of whom, and what it consists of."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.slots.slot_record import (
    MalformedRecordError,
    SlotRecord,
    record_document,
    record_of_document,
)
from megatron_moevement.runtime.transport.wire import ProtocolError

_TRANSFERS = itertools.count()


@dataclasses.dataclass(frozen=True)
class Share:
    """Which bytes of a slot a message brings.

    Attributes:
        transfer: number of what is sent together, over one connection or several; what the process
            sends later has a larger one.
        start: offset of the first one.
        is_last: whether the slot is complete with it.
        beside: windows and slots of the owner's others that it relies on: the copies of those stay.
    """

    transfer: int
    start: int
    is_last: bool
    beside: frozenset[tuple[Window, int]] = frozenset()

    @classmethod
    def whole(cls, beside: Iterable[SlotKey] = ()) -> Share:
        """Returns all bytes of a slot."""
        others = frozenset((key.window, key.slot) for key in beside)
        return cls(next(_TRANSFERS), 0, is_last=True, beside=others)

    def document(self) -> dict[str, Any]:
        """Returns it as what JSON can hold."""
        beside = [[*window, slot] for window, slot in sorted(self.beside)]
        return {"share": [self.transfer, self.start, self.is_last], "beside": beside}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Share:
        """Returns what a message says that it brings.

        Raises:
            ProtocolError: it says nothing of the kind.
        """
        share, beside = document.get("share"), document.get("beside")
        match share, beside:
            case [int(transfer), int(start), bool(is_last)], [*others] if min(transfer, start) >= 0:
                return cls(transfer, start, is_last, frozenset(map(_place_of, others)))
        raise ProtocolError(f"no share of a slot: {share!r} beside {beside!r}")


def key_of(owner: LogicalRank, record: SlotRecord) -> SlotKey:
    """Returns the policy's name of a slot."""
    return SlotKey(owner, record.window, record.slot)


def slot_document(owner: LogicalRank, record: SlotRecord) -> dict[str, Any]:
    """Returns what goes in front of a slot's payload."""
    return {"owner": str(owner), "record": record_document(record)}


def share_document(owner: LogicalRank, record: SlotRecord, share: Share) -> dict[str, Any]:
    """Returns what goes in front of some of a slot's bytes."""
    return {**slot_document(owner, record), **share.document()}


def slot_of_document(document: Mapping[str, Any]) -> tuple[LogicalRank, SlotRecord]:
    """Returns owner and record of a slot that arrives.

    Raises:
        ProtocolError: the document describes no slot.
    """
    try:
        return LogicalRank.parse(document["owner"]), record_of_document(document["record"])
    except (KeyError, TypeError, MalformedRecordError, ValueError) as error:
        raise ProtocolError(f"no slot: {error}") from error


def range_document(key: SlotKey, start: int, size_bytes: int) -> dict[str, Any]:
    """Returns what asks for bytes of a slot."""
    slot = {"owner": str(key.owner), "window": list(key.window), "slot": key.slot}
    return {**slot, "range": [start, size_bytes]}


def range_of_document(document: Mapping[str, Any]) -> tuple[SlotKey, slice]:
    """Returns the slot that a document names, and which of its bytes are asked for.

    Raises:
        ProtocolError: it names none.
    """
    try:
        numbers = [*document["window"], document["slot"], *document["range"]]
        if len(numbers) != 6 or any(type(number) is not int for number in numbers):
            raise ProtocolError(f"no window, slot and range: {numbers}")
        *window, slot, start, size_bytes = numbers
        if min(start, size_bytes) < 0:
            raise ProtocolError(f"no range: {start}, {size_bytes}")
        key = SlotKey(LogicalRank.parse(document["owner"]), Window(*window), slot)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"no slot: {error}") from error
    return key, slice(start, start + size_bytes)


def _place_of(numbers: Any) -> tuple[Window, int]:
    match numbers:
        case [int(start), int(size), int(version), int(slot)]:
            return Window(start, size, version), slot
    raise ProtocolError(f"no window and slot: {numbers!r}")
