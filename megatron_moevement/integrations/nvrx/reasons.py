# SPDX-License-Identifier: Apache-2.0
"""NVRx's reasons for the end of a generation: in words, and which of them tells most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nvidia_resiliency_ext.inprocess.attribution import Interruption as Reason
from nvidia_resiliency_ext.inprocess.attribution import InterruptionRecord

from megatron_moevement.policy.outcome.why_ended import reasons_in_short
from megatron_moevement.policy.report.casualties import HAS_ENDED

REASONS = {
    Reason.HARD_TIMEOUT: "no progress within --inprocess-hard-timeout, it is killed",
    Reason.UNRESPONSIVE: "no heartbeat within --inprocess-heartbeat-timeout",
    Reason.TERMINATED: HAS_ENDED,
    Reason.SOFT_TIMEOUT: "no progress within --inprocess-soft-timeout, it is interrupted",
    Reason.BASE_EXCEPTION: "it leaves the job",
    Reason.MONITOR_PROCESS_EXCEPTION: "its monitor has failed",
    Reason.EXCEPTION: "an exception, which it prints itself",
}
"""What is known from outside; how its process ended, a launcher may say besides. The first of
several tells most: what ended a process before what that led to."""
UNKNOWN = f"{HAS_ENDED} or does not answer"
"""Where others noticed it first, and the list of reasons was closed before its monitor wrote."""
ENDED = frozenset({Reason.TERMINATED, Reason.HARD_TIMEOUT})
"""Reasons that come with the end of a process."""
_ORDER = tuple(reason.name for reason in REASONS)


def in_short(texts: Iterable[str]) -> list[list[Any]]:
    """Returns NVRx's records, each a text, as `policy/outcome/why_ended.py` has them."""
    records = map(InterruptionRecord.from_str, texts)
    return reasons_in_short(((one.rank, one.interruption.name) for one in records), _ORDER)
