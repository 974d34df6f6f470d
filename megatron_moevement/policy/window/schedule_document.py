# SPDX-License-Identifier: Apache-2.0
"""Window schedules as JSON: written by a job, shown by the command.

A document is that of the inventory, with `window`, `slots` (the slot of each operator), and, for
who reads it, `slot_bytes` (what each rank captures in each slot) and the schedule's `digest`.
"""

from __future__ import annotations

import json
import sys
from array import array

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.inventory_document import dump_inventory, load_inventory
from megatron_moevement.policy.job.operators import Inventory, OperatorId
from megatron_moevement.policy.window.schedule import InvalidScheduleError, WindowSchedule


def dump_schedule(schedule: WindowSchedule) -> str:
    """Returns a schedule as JSON; the same schedule gives the same text."""
    document = {
        "window": schedule.window,
        "digest": schedule.digest,
        "slots": {str(one): schedule.slots[one] for one in sorted(schedule.slots)},
        "slot_bytes": {
            str(rank): list(schedule.bytes_by_slot[rank]) for rank in schedule.inventory.ranks
        },
        **json.loads(dump_inventory(schedule.inventory)),
    }
    return json.dumps(document, indent=1) + "\n"


def load_schedule(text: str, origin: str) -> WindowSchedule:
    """Returns the schedule of a JSON document.

    Args:
        origin: where it comes from, for error messages.

    Raises:
        UserError: the document is no schedule.
    """
    inventory = load_inventory(text, origin)
    try:
        document = json.loads(text)
        slots = {OperatorId.parse(name): int(slot) for name, slot in document["slots"].items()}
        return WindowSchedule(inventory, document["window"], slots)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin} is no schedule: {error}") from error


def encoded_bytes(operators: int) -> int:
    """Returns the bytes of a schedule of so many operators."""
    return (operators + 1) * array("H").itemsize


def encode_schedule(schedule: WindowSchedule) -> bytes:
    """Returns W and the slot of each operator, for who knows the inventory."""
    slots = map(schedule.slots.__getitem__, schedule.inventory.sorted_operators)
    return _in_file_order(array("H", (schedule.window, *slots))).tobytes()


def decode_schedule(data: bytes, inventory: Inventory, digest: str) -> WindowSchedule:
    """Returns a schedule of an inventory.

    Args:
        digest: of the schedule that is wanted.

    Raises:
        InvalidScheduleError: it is another one.
    """
    operators = inventory.sorted_operators
    if len(data) != encoded_bytes(len(operators)):
        raise InvalidScheduleError(f"{len(data)} bytes are no slots of {len(operators)} operators")
    numbers = array("H")
    numbers.frombytes(data)
    window, *slots = _in_file_order(numbers)
    schedule = WindowSchedule(inventory, window, dict(zip(operators, slots, strict=True)))
    if schedule.digest != digest:
        raise InvalidScheduleError(f"the schedule {digest} reads as {schedule.digest}")
    return schedule


def _in_file_order(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
