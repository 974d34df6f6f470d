# SPDX-License-Identifier: Apache-2.0
"""Compaction: what is kept of a process's old events, so that its account stays the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from megatron_moevement.policy.accounting.event import PERIODIC, EventName, EventRecord
from megatron_moevement.policy.accounting.steps import LOSSES, Steps, joined

MOST_STEPS = 1000
"""Of one event; its loss is the one of the last of them."""


def compacted(records: Iterable[EventRecord]) -> Iterator[EventRecord]:
    """Yields the events of a process without what only says how it did in the meantime.

    Of steps that follow each other their sums are kept. All else that recurs is left out; what
    happened is kept.

    Args:
        records: in their order.
    """
    held: EventRecord | None = None
    for record in records:
        if record.event in PERIODIC and record.event is not EventName.ITERATION:
            continue
        if held is not None:
            both = _joined(held, record)
            if both is not None:
                held = both
                continue
            yield held
            held = None
        if record.event is EventName.ITERATION:
            held = _without_losses(record)
        else:
            yield record
    if held is not None:
        yield held


def _joined(former: EventRecord, later: EventRecord) -> EventRecord | None:
    """Returns one event of iterations for two; None where something lies between them."""
    if later.event is not EventName.ITERATION:
        return None
    place = (former.generation, former.logical_rank, former.pid)
    if place != (later.generation, later.logical_rank, later.pid):
        return None
    before, after = Steps.of_event(former), Steps.of_event(later)
    if after.first != before.last + 1 or before.number + after.number > MOST_STEPS:
        return None
    if not {"began_s", "steps"} <= former.fields.keys() & later.fields.keys():
        return None
    return _without_losses(dataclasses.replace(later, fields=joined(former.fields, later.fields)))


def _without_losses(record: EventRecord) -> EventRecord:
    fields = {name: value for name, value in record.fields.items() if name != LOSSES}
    return dataclasses.replace(record, fields=fields)
