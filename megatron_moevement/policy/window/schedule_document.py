"""Window schedules as JSON: written by a job, shown by the command.

A document is that of the inventory, with `window`, `slots` (the slot of each operator), and, for
who reads it, `slot_bytes` (what each rank captures in each slot) and the schedule's `digest`.
"""

from __future__ import annotations

import json

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.inventory_document import dump_inventory, load_inventory
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.window.schedule import WindowSchedule


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
