# SPDX-License-Identifier: Apache-2.0
"""Claims: what the events of one process say of its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.accounting.job import KeptSteps
from megatron_moevement.policy.accounting.life import Life
from megatron_moevement.policy.accounting.parts import RECOVERY, Claim, Layer, Part
from megatron_moevement.policy.accounting.steps import Steps, microseconds
from megatron_moevement.policy.recovery.lifecycle import Phase

_PARTS = {
    Phase.PLANNING: Part.PLAN,
    Phase.LOADING: Part.FETCH,
    Phase.SETTLING: Part.FETCH,
    Phase.RESTORING: Part.FETCH,
    Phase.REPLAYING: Part.REPLAY,
    Phase.STANDING_BY: Part.WAIT,
    Phase.REJOINING: Part.REPROTECT,
    Phase.TRAINING: Part.BETWEEN,
    Phase.PAUSED: Part.EVALUATION,
    Phase.ENDING: Part.ENDING,
}
"""What the time in a phase is where nothing in it was measured."""
_LAPS = RECOVERY[RECOVERY.index(Part.BUILD) :]
"""Parts that a process measures one after the other, up to the end of its recovery."""

_MARKS = {
    *(EventName.PHASE, EventName.ITERATION, EventName.REPLAY, EventName.EVALUATION),
    *(EventName.CHECKPOINT_BEGUN, EventName.CHECKPOINT_SAVED, EventName.CHECKPOINT_FAILED),
    *(EventName.FAULT_DETECTED, EventName.PROCESS_START, EventName.RECOVERED),
}
"""Where a process goes from one thing to the next; all others come in the midst of it."""

_SAVES = {EventName.CHECKPOINT_BEGUN, EventName.CHECKPOINT_SAVED, EventName.CHECKPOINT_FAILED}


class Claims:
    """Reads the events of a process in their order, and collects what they say of its time."""

    def __init__(
        self,
        life: Life,
        deaths_us: Sequence[int],
        lost_from: Mapping[int, int | None],
        kept: Mapping[int, KeptSteps | None],
    ) -> None:
        """Begins with the start of the process.

        Args:
            life: of the process.
            deaths_us: when processes of its launch died, by time.
            lost_from: by generation the first step that was trained again later; None for none.
            kept: by generation how far its launch came in it.
        """
        self._life = life
        self._deaths_us = deaths_us
        self._lost_from = lost_from
        self._kept = kept
        self._generation = 0
        self._step_us = 0
        self._found = [Claim(Layer.LIFE, life.begun_us, life.until_us, Part.UNEXPLAINED)]
        self._part, self._since_us = Part.START_UP, life.begun_us
        self._last_us = life.begun_us
        self._trained_us = life.begun_us

    def all_of(self, records: Iterable[EventRecord]) -> list[Claim]:
        """Returns the claims of all events of the process."""
        for record in records:
            now_us = microseconds(record.time)
            self._read(record, now_us)
            if record.event is EventName.ITERATION:
                now_us = Steps.of_event(record).ended_us
            if record.event in _MARKS:
                self._last_us = max(self._last_us, now_us)
        until_us = self._life.until_us
        if self._part is Part.BETWEEN:
            self._cut_off(until_us)
        self._begin(until_us, Part.UNEXPLAINED)
        return self._found

    def _read(self, record: EventRecord, now_us: int) -> None:
        event, fields = record.event, record.fields
        duration_us = microseconds(fields.get("duration_s") or 0.0)
        if event is EventName.SPARE:
            self._begin(now_us, Part.SPARE)
        elif event is EventName.PHASE:
            self._enter(Phase(fields["phase"]), record.generation, now_us)
        elif event is EventName.PROCESS_START:
            self._join(record.generation, fields, now_us)
        elif event is EventName.FAULT_DETECTED:
            self._notice(fields, now_us)
            self._join(record.generation, fields, now_us)
        elif event is EventName.ITERATION:
            self._steps(record)
        elif event is EventName.EVALUATION:
            begun_us = now_us - duration_us if "duration_s" in fields else self._last_us
            self._claim(Layer.MEASURED, begun_us, now_us, Part.EVALUATION)
        elif event in _SAVES:
            self._claim(Layer.MEASURED, now_us - duration_us, now_us, Part.SAVE)
        elif event is EventName.RECOVERED:
            self._recover(fields, now_us)

    def _claim(self, layer: Layer, start_us: int, end_us: int, part: Part) -> None:
        if start_us < end_us:
            self._found.append(Claim(layer, start_us, end_us, part))

    def _begin(self, now_us: int, part: Part) -> None:
        """Ends what has gone on until now, and begins something else."""
        self._claim(Layer.PHASE, self._since_us, now_us, self._part)
        self._part, self._since_us = part, max(self._since_us, now_us)

    def _enter(self, phase: Phase, generation: int, now_us: int) -> None:
        part = _PARTS[phase]
        if phase is Phase.LOADING and generation == 0:
            part = Part.START_UP
        if phase is Phase.TRAINING and self._part is not Part.EVALUATION:
            self._trained_us = now_us
        self._begin(now_us, part)

    def _join(self, generation: int, fields: Mapping[str, Any], now_us: int) -> None:
        """Reads that the process has joined a generation, and when it entered it."""
        if generation and "entered_s" in fields:
            joined_us = microseconds(fields["joined_s"])
            self._begin(microseconds(fields["entered_s"]), Part.RENDEZVOUS)
            self._begin(joined_us, Part.BUILD)
        self._begin(now_us, Part.PLAN if generation else Part.START_UP)

    def _notice(self, fields: Mapping[str, Any], now_us: int) -> None:
        """Reads that a fault was noticed, and what came of it until now."""
        noticed_us = microseconds(fields["noticed_s"])
        since_us = self._last_us
        if fields.get("last_step_s") is not None:
            stopped_us = microseconds(fields["last_step_s"])
            since_us = stopped_us if self._part is Part.BETWEEN else max(since_us, stopped_us)
        dead = [at_us for at_us in self._deaths_us if since_us <= at_us <= noticed_us]
        fault_us = dead[0] if dead else since_us
        if self._part is Part.BETWEEN:
            self._claim(Layer.MEASURED, since_us, fault_us, Part.LOST)
        self._claim(Layer.MEASURED, fault_us, noticed_us, Part.DETECT)
        entered_us = noticed_us + microseconds(fields["teardown_s"])
        self._begin(noticed_us, Part.TEARDOWN)
        self._begin(entered_us, Part.RENDEZVOUS)
        self._begin(entered_us + microseconds(fields["rendezvous_s"]), Part.BUILD)

    def _steps(self, record: EventRecord) -> None:
        """Reads steps: their sums are claimed one after the other, what is left is in between.

        Of steps of which the job has the first ones only, the sums are divided by their numbers.
        """
        steps = Steps.of_event(record)
        kept = steps.before(self._lost_from.get(record.generation))
        kept_us = steps.duration_us * kept // steps.number
        stall_us = min(steps.stall_us * kept // steps.number, kept_us)
        stalled_us = steps.began_us + kept_us - stall_us
        lost_us = steps.ended_us - (steps.duration_us - kept_us)
        self._claim(Layer.MEASURED, steps.began_us, stalled_us, Part.USEFUL)
        self._claim(Layer.DETAIL, stalled_us, stalled_us + stall_us, Part.STALL)
        self._claim(Layer.MEASURED, lost_us, steps.ended_us, Part.LOST)
        self._trained_us = steps.ended_us
        self._generation, self._step_us = record.generation, steps.mean_us

    def _cut_off(self, until_us: int) -> None:
        """Ends a process that was killed while it trained: it had steps that it had not recorded.

        The job has those that others recorded, and those that come before the next one that it
        trained; their times are known, or taken to be as long as the ones before.
        """
        kept, trained_us = self._kept.get(self._generation), self._trained_us
        if kept is not None:
            known_us = max(trained_us, kept.ended_us) + kept.unrecorded * self._step_us
            trained_us = min(known_us, until_us)
        self._claim(Layer.MEASURED, self._trained_us, trained_us, Part.USEFUL)
        self._claim(Layer.MEASURED, trained_us, until_us, Part.LOST)

    def _recover(self, fields: Mapping[str, Any], now_us: int) -> None:
        """Reads how long the parts of a recovery took, the last of which has just ended."""
        end_us = microseconds(fields["rejoined_s"]) if "rejoined_s" in fields else now_us
        for part in reversed(_LAPS):
            start_us = end_us - microseconds(fields["breakdown_s"].get(part.value, 0.0))
            self._claim(Layer.MEASURED, start_us, end_us, part)
            end_us = start_us
        self._begin(now_us, Part.WAIT)
