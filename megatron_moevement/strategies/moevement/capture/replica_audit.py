# SPDX-License-Identifier: Apache-2.0
"""The audit of replicas: compares the checksums of slots that are long in memory.

The capture's thread made them. What is left for the training thread is one small exchange within
the stage in each interval.
"""

from __future__ import annotations

import dataclasses
import logging

from megatron_moevement.policy.copies.audit import audit, is_audited
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.strategies.live_objects import LiveObjects

logger = logging.getLogger(__name__)

_LANDED_AFTER = 2
"""Steps: the copies of the step after were awaited, and slots land one after the other."""
_FULL = f":{Content.FULL.value}"


class ReplicaAudit:
    """Compares what this rank captured with its replicas; the training thread calls it."""

    def __init__(
        self,
        interval: int | None,
        objects: LiveObjects,
        events: Events,
        notices: Notices,
    ) -> None:
        """Compares nothing yet.

        Args:
            interval: steps from one audit to the next; None: there is none.
            notices: lines for the user, printed on one rank.
        """
        self._objects = objects
        self._events = events
        self._interval = interval
        if interval is not None and not objects.optimizer.is_state_whole:
            self._interval = None
            notices.warn(
                "--moevement-audit-interval compares nothing: with --use-distributed-optimizer "
                "each rank has a part of the state of its own"
            )

    def after_step(self, step: int, timetable: Timetable, ring: RingFile) -> None:
        """Compares the slot of the step before the last, where it is due; every rank calls it.

        Args:
            step: that was just committed.
        """
        audited = step - _LANDED_AFTER
        if self._interval is None or audited < timetable.first_step:
            return
        slot, window = timetable.slot_of(audited), timetable.window_of(audited).size
        if not is_audited(audited, slot, interval=self._interval, window=window):
            return
        record = ring.record(audited)
        parts = {
            part.name.removesuffix(_FULL): f"{part.checksum:016x}"
            for part in (() if record is None else record.parts)
            if part.name.endswith(_FULL)
        }
        objects, stage = self._objects, self._objects.groups.tp_dp_cp
        own = [objects.rank._asdict(), parts]
        captured = {
            LogicalRank(**rank): found
            for rank, found in all_gather_json(own, objects.device, stage)
        }
        found = audit(captured)
        self._events.emit(
            EventName.AUDIT,
            audited,
            operators=found.operators,
            differences=[dataclasses.asdict(one) for one in found.differences],
        )
        if objects.rank == min(captured):
            for one in found.differences:
                logger.warning(
                    "replicas differ in step %d: %s of %s is not what the others of %s have",
                    audited,
                    one.operator,
                    ", ".join(one.odd),
                    ", ".join(one.ranks),
                )
