# SPDX-License-Identifier: Apache-2.0
"""Replay: from the first slot of a window to the state that was committed last.

Slot 0 makes its operators active at S_start, the others frozen. Each replayed step changes the
active ones as the step did the first time, with the scalars of the ledger; then the next slot makes
more operators active. After the last slot the state is dense, and the steps that are left to the
target are ordinary ones. A replay from a dense state, as a checkpoint is, has only such steps. One
that was interrupted before the last slot goes on from the state that it had reached: operators of
earlier slots are active in it, and the slot of that step is put back again.

Source: section 3.2, sparse-to-dense conversion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.slot_layout import SlotLayout
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.facts.facts import Condition, LiveState
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import UnknownScheduleError
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.peers.connection import DamagedError
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import EXTRAS, SlotRecord
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.carried_state import SurvivingState
from megatron_moevement.strategies.moevement.recovery.replay_witness import ReplayWitness
from megatron_moevement.strategies.moevement.session import RankSession
from megatron_moevement.strategies.scalars import SlotScalars, same_scalars


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where this rank's slots of a window are, and what is in them.

    Attributes:
        ring: holds them all, intact.
        layouts: for each slot what lies where.
    """

    ring: RingFile
    window: Window
    layouts: tuple[SlotLayout, ...]

    def scalars(self, slot: int) -> SlotScalars:
        """Returns the scalars that go with a slot."""
        record = self.ring.held(self.window.step_of(slot))
        part = record.part(EXTRAS)
        payload = self.ring.payload(record)
        return SlotScalars.decode(bytes(payload[part.offset : part.offset + part.size_bytes]))

    def full_before(self, slot: int) -> frozenset[OperatorId]:
        """Returns the operators that are FULL in a slot before this one."""
        parts = [part for layout in self.layouts[:slot] for part in layout.parts]
        return frozenset(part.operator for part in parts if part.content is Content.FULL)

    def put_back(self, slot: int, live: LiveOperators) -> frozenset[OperatorId]:
        """Fills the live tensors from a slot; returns the operators that are FULL in it.

        Raises:
            DamagedError: it does not read as it was captured.
            UnknownScheduleError: the layouts are those of another schedule.
        """
        record = self.ring.record(self.window.step_of(slot))
        damaged = ("all of it",) if record is None else self.ring.damaged_parts(record)
        if record is None or damaged:
            raise DamagedError(
                f"slot {slot} of the window of step {self.window.start} is damaged in "
                f"{self.ring.path}: {', '.join(damaged[:3])}; launch again to take another copy"
            )
        self._check_schedule(slot, record)
        buffer = torch.frombuffer(self.ring.payload(record), dtype=torch.uint8)
        full = set()
        for part in self.layouts[slot].parts:
            live.put_back(part.operator, part.content, list(part.views(buffer)))
            if part.content is Content.FULL:
                full.add(part.operator)
        return frozenset(full)

    def _check_schedule(self, slot: int, record: SlotRecord) -> None:
        """Checks that a slot holds what the schedule of its window has in it."""
        held = [part.name for part in record.parts if part.name != EXTRAS]
        if slot >= len(self.layouts) or held != [part.name for part in self.layouts[slot].parts]:
            raise UnknownScheduleError(f"{record.window} was captured under another schedule")


class Replay:
    """One replay of this rank; the training thread of every rank in scope calls it in step."""

    def __init__(
        self,
        session: RankSession,
        freezing: Freezing,
        slots: Slots | None,
        plan: Plan,
        *,
        entries: Mapping[int, LedgerEntry],
        witness: ReplayWitness,
        begins: SurvivingState,
    ) -> None:
        """Names what is replayed; `enter` must follow.

        Args:
            slots: the window; None where all replay from what is durable.
            plan: that is carried out; it says whether other stages stand by.
            entries: of the steps (start, target], as they were done for the first time.
            begins: the state that it begins with; a partial one has its step's slot put back first.
        """
        self._session = session
        self._freezing = freezing
        self._slots = slots
        self._entries = entries
        self.target = plan.target
        """T."""
        self.is_alone = plan.is_apart
        """Whether other stages stand by."""
        self.witness = witness
        self._open = window = begins.state.window
        self._active: frozenset[OperatorId] = frozenset()
        if slots is not None and window is not None:
            self._active = slots.full_before(begins.state.step - window.start)
        self.start = self.progress = begins.own_scalars.progress
        """The progress that the replay begins with, and that it has come to."""
        self.is_verified = True
        """Whether the scalars of the newest replayed step are those of the ledger, bit for bit."""

    @property
    def reached(self) -> int:
        """K of the S_k that the replay has come to."""
        return self.progress.committed

    @property
    def is_dense(self) -> bool:
        """Whether all slots of the window are put back, or none is to be."""
        return self._open is None

    @property
    def state(self) -> LiveState:
        """What is reached, as facts describe it."""
        condition = Condition.DENSE if self.is_dense else Condition.PARTIAL
        return LiveState(condition, self.reached, self._open)

    @property
    def is_over(self) -> bool:
        """Whether the state is dense and nothing is left to replay."""
        return self.is_dense and self.reached >= self.target

    def enter(self) -> None:
        """Brings in what was captured of the state that is reached.

        It makes collectives within the stage. Tensors of active operators are in no later slot, so
        an interrupt leaves nothing that putting the slot back again does not repair.
        """
        slots, window, step = self._slots, self._open, self.reached
        if slots is None or window is None:
            return
        objects, live, slot = self._session.objects, self._session.live, step - window.start
        scalars = slots.scalars(slot)
        if slot == 0:
            objects.restore(scalars)
            objects.optimizer.set_group_steps(scalars.adam_step)
        full = slots.put_back(slot, live)
        live.set_step(full, scalars.adam_step)
        self._active |= full
        live.complete()
        self._freezing.set_active(self._active)
        if step == window.last:
            self._open = None
            digest = live.digest()
            self.witness.note_state(step, scalars.state, None if digest is None else digest())
            objects.faults.strike(step, FaultPoint.DENSE)

    def statistics(self, step: int) -> GradientStatistics | None:
        """Returns what the ledger says of a step's gradients; None when they speak themselves.

        Statistics are computed by all ranks together, so the window decides: one stage may be dense
        while another still converts it, and has no gradients for some operators. Stages that stand
        by compute none.
        """
        all_dense = self._slots is None or step > self._slots.window.last
        if all_dense and not self.is_alone:
            return None
        entry = self._entries[step]
        return GradientStatistics(found_inf=entry.found_inf, norm=entry.grad_norm)

    def agreed(self, step: int) -> LedgerEntry:
        """Returns what all ranks agreed on when a step was done for the first time."""
        return self._entries[step]

    def committed(self, entry: LedgerEntry, progress: Progress) -> None:
        """Notes that a step was committed again.

        Args:
            entry: of the step, as it was replayed.
            progress: behind it.
        """
        self.is_verified = same_scalars(entry, self._entries[entry.step])
        self.progress = progress
