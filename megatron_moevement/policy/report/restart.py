# SPDX-License-Identifier: Apache-2.0
"""What the processes of a launch record of one restart, or of the start of a relaunch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.steps import microseconds
from megatron_moevement.policy.outcome.account import RecoveryAccount
from megatron_moevement.policy.outcome.recoveries import recovery_of

PLANNED = (
    *("verdict", "reason", "target", "scope", "window", "replayed_steps", "lost_steps"),
    *("roll_forward", "copies"),
)
"""What a report has of a plan."""


@dataclasses.dataclass
class Restart:
    """Of one generation of one launch; it takes in the events of one process after the other.

    Attributes:
        losses: by number of the process, as the survivors found them.
        phases: in which ranks were interrupted.
        noticed_us: when the first rank noticed the fault, in microseconds since the epoch.
        committed: the newest step of any survivor.
        plan: that all ranks made; None before it.
        recovered: what ranks report at the end of the recovery.
        differed: what a replay that differed from the first time was reported as.
    """

    losses: dict[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    phases: set[str] = dataclasses.field(default_factory=set)
    noticed_us: int | None = None
    committed: int | None = None
    plan: Mapping[str, Any] | None = None
    recovered: list[EventRecord] = dataclasses.field(default_factory=list)
    differed: Mapping[str, Any] | None = None

    def take(self, record: EventRecord) -> None:
        """Takes in an event of its generation; most are not its concern."""
        fields = record.fields
        if record.event is EventName.FAULT_DETECTED:
            self._detect(record)
        elif record.event is EventName.PLAN and self.plan is None:
            self.plan = {name: fields[name] for name in PLANNED if name in fields}
        elif record.event is EventName.RECOVERED:
            if record.logical_rank not in {one.logical_rank for one in self.recovered}:
                self.recovered.append(record)
        elif record.event is EventName.REPLAY_DIFFERED and self.differed is None:
            self.differed = {name: fields[name] for name in ("ranks", "consequence", "proof")}

    def account(self) -> RecoveryAccount | None:
        """Returns what its recovery came to; None where no rank reports one."""
        return recovery_of(self.recovered) if self.recovered else None

    def _detect(self, record: EventRecord) -> None:
        fields = record.fields
        noticed_us = microseconds(fields["noticed_s"])
        self.noticed_us = min(noticed_us, self.noticed_us or noticed_us)
        self.committed = max(record.iteration, self.committed or 0)
        if fields.get("phase") is not None:
            self.phases.add(fields["phase"])
        for loss in fields.get("losses", ()):
            known = self.losses.get(loss["process"])
            if known is None or known.get("end") is None:
                self.losses[loss["process"]] = loss
