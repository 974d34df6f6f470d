"""Replay: from the first slot of a window to the state that was committed last.

Slot 0 makes its operators active at S_start, the others frozen. Each replayed step changes the
active ones as the step did the first time, with the scalars of the ledger; then the next slot makes
more operators active. After the last slot the state is dense, and the steps that are left to the
target are ordinary ones. A replay from a dense state, as a checkpoint is, has only such steps.

Source: section 3.2, sparse-to-dense conversion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum

import torch

from megatron_moevement.integrations.megatron.freezing import Freezing
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.slot_layout import SlotLayout
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.peers.connection import DamagedSlotError
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.slots.slot_record import EXTRAS
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.recovery.replay_witness import ReplayWitness
from megatron_moevement.strategies.scalars import SlotScalars, same_scalars


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where this rank's slots of a window are, and what is in them.

    Attributes:
        ring: holds them all, intact.
        window: the window.
        schedule: that it was captured under.
        layouts: for each slot what lies where.
    """

    ring: RingFile
    window: Window
    schedule: WindowSchedule
    layouts: tuple[SlotLayout, ...]

    def scalars(self, slot: int) -> SlotScalars:
        """Returns the scalars that go with a slot."""
        record = self.ring.held(self.window.step_of(slot))
        part = record.part(EXTRAS)
        payload = self.ring.payload(record)
        return SlotScalars.decode(bytes(payload[part.offset : part.offset + part.size_bytes]))

    def put_back(self, slot: int, live: LiveOperators) -> frozenset[OperatorId]:
        """Fills the live tensors from a slot; returns the operators that are FULL in it.

        Raises:
            DamagedSlotError: it does not read as it was captured.
        """
        record = self.ring.record(self.window.step_of(slot))
        damaged = ("all of it",) if record is None else self.ring.damaged_parts(record)
        if damaged:
            raise DamagedSlotError(
                f"slot {slot} of the window of step {self.window.start} is damaged in "
                f"{self.ring.path}: {', '.join(damaged[:3])}; launch again to take another copy"
            )
        buffer = torch.frombuffer(self.ring.buffer(self.window.step_of(slot)), dtype=torch.uint8)
        full = set()
        for part in self.layouts[slot].parts:
            live.put_back(part.operator, part.content, list(part.views(buffer)))
            if part.content is Content.FULL:
                full.add(part.operator)
        return frozenset(full)


class Injection(Enum):
    """In which steps gradients take their statistics from the ledger."""

    WHILE_FROZEN = "while frozen"
    """No norm of all gradients can be computed while some operators of the job have none."""

    ALWAYS = "always"
    """The other stages compute none: they stand by."""


@dataclasses.dataclass(frozen=True)
class ReplayedStep:
    """What one replayed step did.

    Attributes:
        step: k.
        active: operators of this rank that were trained.
        frozen: operators of this rank that were not.
        verified: whether its scalars are those of the ledger, bit for bit.
    """

    step: int
    active: int
    frozen: int
    verified: bool


class Replay:
    """One replay of this rank; the training thread of every rank in scope calls it in step."""

    def __init__(
        self,
        objects: LiveObjects,
        live: LiveOperators,
        freezing: Freezing,
        slots: Slots | None,
        *,
        entries: Mapping[int, LedgerEntry],
        target: int,
        witness: ReplayWitness,
        injection: Injection = Injection.WHILE_FROZEN,
        start: Progress,
        is_dense: bool,
    ) -> None:
        """Names what is replayed; `enter` must follow.

        Args:
            objects: the live objects.
            live: this rank's operators.
            freezing: what freezes them.
            slots: the window; None where it begins with a checkpoint.
            entries: the ledger's entries of the steps (start, target].
            target: T.
            witness: compares what is replayed with the first time.
            injection: when the ledger's statistics are taken.
            start: the progress that it begins with.
            is_dense: whether it goes on from the live state, which an interrupted replay has left
                or which was loaded, and not from the window's first slot.
        """
        self._objects = objects
        self._live = live
        self._freezing = freezing
        self._slots = slots
        self._entries = entries
        self.target = target
        self.witness = witness
        self._injection = injection
        self._active: frozenset[OperatorId] = frozenset()
        self._begins_dense = is_dense
        self.start = self.progress = start
        """The progress that the replay begins with, and that it has come to."""
        self.reached = self.start.committed
        self.steps: list[ReplayedStep] = []
        """What each step did that was committed again, in order."""

    @property
    def is_dense(self) -> bool:
        """Whether all operators are active in the state that is reached."""
        return self._begins_dense or len(self._active) == len(self._live.operators)

    @property
    def is_over(self) -> bool:
        """Whether the state is dense and nothing is left to replay."""
        last = self.target if self._slots is None else self._slots.window.last
        return self.reached >= max(self.target, last)

    def enter(self, step: int) -> None:
        """Brings in what was captured of S_step; the state has just reached it.

        It makes collectives within the stage.
        """
        self.reached = step
        slots = self._slots
        if self._begins_dense or slots is None or step > slots.window.last:
            return
        slot = step - slots.window.start
        scalars = slots.scalars(slot)
        if slot == 0:
            self._objects.restore(scalars)
            self._objects.optimizer.set_group_steps(scalars.adam_step)
        full = slots.put_back(slot, self._live)
        self._live.set_step(full, scalars.adam_step)
        self._active |= full
        self._live.complete()
        self._freezing.set_active(self._active)
        if step == slots.window.last:
            self.witness.note_state(step, scalars.state, self._live.digest())
            self._objects.faults.strike(step, FaultPoint.DENSE)

    def statistics(self, step: int) -> GradientStatistics | None:
        """Returns what the ledger says of a step's gradients; None when they speak themselves.

        Statistics are computed by all ranks together, so the window decides: the slots of one stage
        may be dense before those of another.
        """
        all_dense = self._slots is None or step > self._slots.window.last
        if all_dense and self._injection is Injection.WHILE_FROZEN:
            return None
        entry = self._entries[step]
        return GradientStatistics(found_inf=entry.found_inf, norm=entry.grad_norm)

    @property
    def is_alone(self) -> bool:
        """Whether other stages stand by."""
        return self._injection is Injection.ALWAYS

    def agreed(self, step: int) -> LedgerEntry:
        """Returns what all ranks agreed on when a step was done for the first time."""
        return self._entries[step]

    def committed(self, entry: LedgerEntry, progress: Progress) -> None:
        """Notes that a step was committed again.

        Args:
            entry: of the step, as it was replayed.
            progress: behind it.
        """
        frozen = len(self._freezing.frozen)
        step = ReplayedStep(
            step=entry.step,
            active=len(self._live.operators) - frozen,
            frozen=frozen,
            verified=same_scalars(entry, self._entries[entry.step]),
        )
        self.steps.append(step)
        self.progress = progress
