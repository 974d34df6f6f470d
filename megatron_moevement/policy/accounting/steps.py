# SPDX-License-Identifier: Apache-2.0
"""Steps that a process trained one after the other: their sums, as one event has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_moevement.policy.accounting.event import EventRecord

_SUMS = frozenset(
    {
        *("steps", "duration_s", "stall_s", "skipped"),
        *("captured_bytes", "metadata_bytes", "replicated_bytes", "log_bytes"),
        *("copy_s", "hash_s", "log_s", "await_copy_s", "await_room_s", "await_log_s"),
    }
)
_BY_PEER = "send_s"
LOSSES = "losses"
"""The field with the loss of each step, where there are several; the last one is the newest."""
_MOST_LOSSES = 10_000


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of one process, between which it only reported; times are microseconds.

    Attributes:
        first: of them.
        last: of them.
        began_us: when the first one began, since the epoch.
        ended_us: when the last one ended.
        duration_us: of the steps themselves.
        stall_us: how much of that they waited for what protects them.
    """

    first: int
    last: int
    began_us: int
    ended_us: int
    duration_us: int
    stall_us: int

    @classmethod
    def of_event(cls, record: EventRecord) -> Steps:
        """Reads an event of iterations; an older build wrote one for each, and not all fields."""
        fields = record.fields
        ended_s = fields.get("ended_s")
        ended_us = microseconds(record.time if ended_s is None else ended_s)
        duration_us = microseconds(fields.get("duration_s") or 0.0)
        began_s = fields.get("began_s")
        began_us = ended_us - duration_us if began_s is None else microseconds(began_s)
        return cls(
            first=record.iteration - max(1, int(fields.get("steps", 1))) + 1,
            last=record.iteration,
            began_us=min(began_us, ended_us),
            ended_us=ended_us,
            duration_us=min(duration_us, ended_us - min(began_us, ended_us)),
            stall_us=microseconds(fields.get("stall_s") or 0.0),
        )

    @property
    def number(self) -> int:
        """How many they are."""
        return self.last - self.first + 1

    @property
    def mean_us(self) -> int:
        """From one step to the next."""
        return (self.ended_us - self.began_us) // self.number

    def before(self, step: int | None) -> int:
        """Returns how many of them come before a step; all where there is none."""
        return self.number if step is None else min(max(step - self.first, 0), self.number)


def joined(former: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an event of iterations that stands for two.

    Args:
        former: fields of the steps before.
        later: of those that follow them.
    """
    found = {**former, **later}
    for name in _SUMS & former.keys() & later.keys():
        found[name] = former[name] + later[name]
    if "began_s" in former:
        found["began_s"] = former["began_s"]
    if _BY_PEER in former and _BY_PEER in later:
        peers = {**former[_BY_PEER], **later[_BY_PEER]}
        found[_BY_PEER] = {
            peer: former[_BY_PEER].get(peer, 0.0) + later[_BY_PEER].get(peer, 0.0) for peer in peers
        }
    if "loss" in former and "loss" in later:
        found[LOSSES] = [*losses_of(former), *losses_of(later)][-_MOST_LOSSES:]
    return found


def losses_of(fields: Mapping[str, Any]) -> list[Any]:
    """Returns the losses of the newest steps of an event, the newest last."""
    if LOSSES in fields:
        return list(fields[LOSSES])
    return [fields["loss"]] if "loss" in fields else []


def microseconds(seconds: Any) -> int:
    """Returns a time of an event as an integer, so that durations add up exactly."""
    return round(float(seconds) * 1e6)
