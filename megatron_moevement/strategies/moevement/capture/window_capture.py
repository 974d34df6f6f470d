# SPDX-License-Identifier: Apache-2.0
"""Window capture: takes the slot of every committed step and keeps account of its copies."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch

from megatron_moevement.integrations.megatron.slot_layout import SlotLayout
from megatron_moevement.integrations.megatron.snapshots import DIGEST_CHARACTERS
from megatron_moevement.policy.copies.commit import may_vote
from megatron_moevement.policy.copies.retention import retain
from megatron_moevement.policy.copies.slot_ring import SlotRing
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.policy.watching.measurements import NOT_MEASURED, Reduced, are_due
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.runtime.capture.capture import Capture, CaptureError, HostCopies
from megatron_moevement.runtime.coordination.commit_barrier import DisagreementError
from megatron_moevement.runtime.faults.fault_points import NO_FAULTS, FaultPoints
from megatron_moevement.runtime.slots.slot_record import EXTRAS, SlotPart, SlotRecord
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.capture.pace import Pace
from megatron_moevement.strategies.moevement.capture.profiler import Profiler
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.strategies.scalars import SlotScalars


@dataclasses.dataclass(frozen=True)
class SlotContents:
    """What one rank's slots hold.

    Attributes:
        timetable: which schedule is in force when.
        layouts: by the digest of a schedule, what this rank captures in each slot of a window.
        rollbacks: rollbacks that lie behind the job.
    """

    timetable: Timetable
    layouts: Mapping[str, tuple[SlotLayout, ...]]
    rollbacks: int

    def layout(self, step: int) -> SlotLayout:
        """Returns what is captured of S_step."""
        return self.layouts[self.timetable.at(step).digest][self.timetable.slot_of(step)]

    def places(self, step: int, payload_bytes: int) -> dict[str, slice]:
        """Returns where each part of S_step lies: the layout's, and behind them the extras."""
        layout = self.layout(step)
        places = {
            part.name: slice(part.offset, part.offset + part.size_bytes) for part in layout.parts
        }
        return places | {EXTRAS: slice(layout.size_bytes, payload_bytes)}

    def digested(self, step: int) -> Content:
        """Returns what the digest in the slot of S_step covers.

        The state at the end of a window is the one that a conversion is compared with. Masters show
        what any other step changed, and take a third of the reading.
        """
        is_last = step == self.timetable.window_of(step).last
        return Content.FULL if is_last else Content.COMPUTE

    def record(self, step: int, payload_bytes: int, parts: tuple[SlotPart, ...]) -> SlotRecord:
        """Returns the record of S_step."""
        return SlotRecord(
            rollbacks=self.rollbacks,
            window=self.timetable.window_of(step),
            slot=self.timetable.slot_of(step),
            step=step,
            payload_bytes=payload_bytes,
            parts=parts,
        )


class WindowCapture:
    """Captures this rank's slots; the training thread calls it."""

    def __init__(
        self,
        capture: Capture,
        copies: SlotReplicator,
        contents: SlotContents,
        ring: SlotRing,
        *,
        faults: FaultPoints = NO_FAULTS,
        state_digest: Callable[[Content], Callable[[], str] | None] = lambda content: None,
        admits: Callable[[SlotRecord], bool] = lambda _: True,
    ) -> None:
        """Goes on where a former launch ended, or begins.

        Args:
            copies: has the file that receives the slots, and carries them to their holders.
            ring: what the ring file holds that is needed.
            state_digest: returns what computes, on the capture's thread, the digest of the live
                state: of all of it in the last slot of a window, in others of its masters.
            admits: is asked, on the capture's thread, whether a slot may be kept.
        """
        self._capture = capture
        self._file = copies.ring
        self._copies = copies
        self._contents = contents
        self._ring = ring
        self._faults = faults
        self._state_digest = state_digest
        self._admits = admits
        self._pace = Pace()
        self.captured_bytes = 0
        self.metadata_bytes = 0
        self.profiler = Profiler()
        """Knows how long slots take, and what was waited for."""

    @property
    def next_step(self) -> int:
        """K of the S_k that is captured next."""
        return self._ring.next_step

    def follow(self, contents: SlotContents) -> None:
        """Goes by another timetable from the next slot on."""
        self._contents = contents

    @property
    def timetable(self) -> Timetable:
        """That it goes by."""
        return self._contents.timetable

    def measured(self, step: int) -> Reduced:
        """Returns what this rank tells of its bandwidths, at the steps at which all do."""
        if not are_due(self.timetable, step):
            return NOT_MEASURED
        begins = self.timetable.at(step).first_step == step
        return self.profiler.measured(self._copies, begins=begins)

    def begin(self, step: int, scalars: SlotScalars) -> None:
        """Prepares to capture S_step, which was just committed; the capture is started for it."""
        if step != self._ring.next_step:
            raise DisagreementError(f"S_{step} after {self._ring.steps}")
        needed, self._ring = self._ring.steps, self._ring.captured()
        if self._contents.timetable.slot_of(step) == 0:
            self._faults.strike(step, FaultPoint.WINDOW_EDGE)
        layout = self._contents.layout(step)
        room_bytes = self._file.shape.extent_bytes(layout.size_bytes)
        memory = self._file.reserve(step, room_bytes, needed)
        digest = self._state_digest(self._contents.digested(step))
        stand_in = None if digest is None else "0" * DIGEST_CHARACTERS
        extras = dataclasses.replace(scalars, state=stand_in).encode()
        payload_bytes = layout.size_bytes + len(extras)
        if payload_bytes > len(memory):
            raise CaptureError(f"a slot of {payload_bytes} bytes, there is room for {len(memory)}")
        behind = memory[layout.size_bytes : payload_bytes]
        behind[:] = extras
        taken = [piece.taken() for part in layout.parts for piece in part.pieces]
        self._faults.strike(step, FaultPoint.CAPTURE)
        self._capture.prepare(
            self._copies_of(step, layout, taken, memory),
            functools.partial(self._landed, step, memory[:payload_bytes]),
            copied=functools.partial(_add_digest, behind, scalars, digest),
        )
        self.captured_bytes = layout.captured_bytes
        self.metadata_bytes = len(extras)

    def await_commit(self) -> Window | None:
        """Waits until the live state may change and the next slot will find room.

        Returns:
            The newest window of which all copies of this rank's slots are acknowledged.
        """
        copy_wait = self._capture.await_copies()
        started_s = time.perf_counter()
        self._copies.mend()
        if not self._may_vote():
            self._capture.await_landed()
        waited = not self._may_vote()
        self._copies.await_until(self._may_vote)
        room_wait = timedelta(seconds=time.perf_counter() - started_s)
        self.profiler.waits = (copy_wait, room_wait)
        if self._copies.is_in_trouble:
            self.profiler.is_in_trouble()
        if self._ring.is_full(self.timetable):
            self._pace.note(self._ring.next_step, waited=waited and not self._copies.is_in_trouble)
        return self._copies.acknowledgements.newest_complete()

    def _may_vote(self) -> bool:
        return may_vote(self._ring, self.timetable, self._copies.acknowledgements)

    def drop_before(self, window: Window) -> None:
        """Frees the room of the slots before a window that is persisted."""
        oldest = retain(window, 0).oldest_slot_step
        if oldest > self._ring.oldest:
            self._ring = self._ring.dropped_before(oldest)
            self._copies.drop_before(window)

    def _landed(self, step: int, payload: memoryview) -> None:
        """Makes the checksums of a slot and sends it off; on the capture's thread."""
        parts = self._capture.parts_of(payload, self._contents.places(step, payload.nbytes))
        record = self._contents.record(step, payload.nbytes, parts)
        told_bytes = 0 if record.is_empty else payload.nbytes  # scalars say nothing of bandwidths
        self.profiler.captured(told_bytes, self._capture.copy_s, self._capture.hash_s)
        if not self._admits(record):
            return
        self._faults.strike(step, FaultPoint.PUBLISH)
        record = self._file.publish(record)
        self._faults.strike(step, FaultPoint.AFTER_PUBLISH)
        self._copies.land(record)

    def _copies_of(
        self, step: int, layout: SlotLayout, taken: Sequence[torch.Tensor], memory: memoryview
    ) -> Iterator[HostCopies]:
        """Yields the copies of a slot, and passes the fault point in the middle of them."""
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        views = [view for part in layout.parts for view in part.views(buffer)]
        middle = len(taken) // 2
        yield HostCopies(taken[:middle], views[:middle])
        if taken:
            self._faults.strike(step, FaultPoint.COPY)
        yield HostCopies(taken[middle:], views[middle:])


def _add_digest(extras: memoryview, scalars: SlotScalars, digest: Callable[[], str] | None) -> None:
    """Writes scalars of a slot anew, with the digest of the state."""
    if digest is not None:
        extras[:] = dataclasses.replace(scalars, state=digest()).encode()
