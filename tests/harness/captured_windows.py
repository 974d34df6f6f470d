# SPDX-License-Identifier: Apache-2.0
"""Window capture without a model: operators whose every value tells of which state it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch

from megatron_moevement.integrations.megatron.random_state import random_state
from megatron_moevement.integrations.megatron.slot_layout import SlotLayout, slot_layouts
from megatron_moevement.integrations.megatron.snapshots import LiveOperators, Piece, digest_of
from megatron_moevement.policy.copies.placement import Placement
from megatron_moevement.policy.copies.slot_ring import SlotRing, ring_capacity
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.state_recipe import Content, Timing
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.runtime.capture.capture import Capture
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import EXTRAS
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.strategies.moevement.capture.window_capture import (
    SlotContents,
    WindowCapture,
)
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.strategies.scalars import SlotScalars
from tests.harness.late_stream import LateStream
from tests.harness.loopback_transport import Link, Loopback

_RANK = LogicalRank()
_W = 3


class TellingOperators:
    """Three experts and a gate: masters, a moment, and a buffer that the forward pass changes."""

    def __init__(self) -> None:
        names = [OperatorId(OperatorKind.EXPERT, 0, number) for number in range(3)]
        names.append(OperatorId(OperatorKind.GATE, 0))
        self._bias = torch.zeros(5)
        self._trained: list[torch.Tensor] = []
        self._pieces: dict[tuple[OperatorId, Content], tuple[Piece, ...]] = {}
        for size, operator in enumerate(names, start=7):
            master, moment = torch.zeros(size), torch.zeros(size)
            self._trained += [master, moment]
            buffers = [Piece("bias", self._bias, torch.float32, Timing.AT_ONCE)]
            if operator.kind is not OperatorKind.GATE:
                buffers.clear()
            full = [Piece("master", master, master.dtype), Piece("moment", moment, moment.dtype)]
            self._pieces[operator, Content.FULL] = (*full, *buffers)
            compute = Piece("master", master, torch.bfloat16)
            self._pieces[operator, Content.COMPUTE] = (*buffers, compute)

    def pieces(self, operator: OperatorId, content: Content) -> tuple[Piece, ...]:
        """Returns the tensors of an operator."""
        return self._pieces[operator, content]

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators with their bytes, ascending."""
        names = sorted({operator for operator, _ in self._pieces})
        return tuple(Operator(one, *(self._bytes(one, what) for what in Content)) for one in names)

    def _bytes(self, operator: OperatorId, content: Content) -> int:
        return sum(piece.size_bytes for piece in self.pieces(operator, content))

    def digest(self, content: Content) -> Callable[[], str] | None:
        """Returns what computes the digest of all of them as they are now."""
        return digest_of(
            piece for operator in self.operators for piece in self.pieces(operator.id, content)
        )

    def optimize(self, step: int) -> None:
        """Changes what an optimizer changes into S_step."""
        for place, tensor in enumerate(self._trained):
            tensor.copy_(torch.arange(len(tensor)) + 100.0 * step + place)

    def compute(self, step: int) -> None:
        """Changes what the forward pass of a step changes."""
        self._bias.fill_(step + 0.5)


class CapturedWindows:
    """Captures the states of a job whose steps take no time, through a stream that is late."""

    def __init__(
        self,
        store: StoreDirectory,
        sender: SlotSender,
        capture: Capture,
        holders: tuple[int, ...] = (),
    ) -> None:
        self._capture = capture
        self._live = TellingOperators()
        operators = self._live.operators
        slots = {operator.id: number % _W for number, operator in enumerate(operators)}
        self._schedule = WindowSchedule(Inventory({_RANK: operators}), _W, slots)
        self._layouts = layouts_of(self._schedule, self._live)
        capacity = ring_capacity(_W, 1)
        self._ring: RingFile = store.ring(
            RingRole.OWN, _RANK, RingShape.equal(capacity, 1 << 16, 6)
        )
        self._windows = WindowCapture(
            capture,
            SlotReplicator(
                sender, self._ring, Placement({_RANK: holders}, len(holders), len(holders)), ()
            ),
            SlotContents(
                Timetable.begun(self._schedule, 0),
                {self._schedule.digest: self._layouts},
                rollbacks=0,
            ),
            SlotRing(capacity, 1),
            state_digest=self._live.digest,
        )
        self.stalls: list[timedelta] = []
        """How long each step but the first waited."""

    def run(self, steps: int) -> tuple[list[int], int]:
        """Trains; returns the steps whose slot is not their state, and how many were looked at."""
        checked: list[Window] = []
        wrong: list[int] = []
        for step in range(steps):
            complete = self._windows.await_commit() if step else None
            self.stalls += [sum(self._windows.profiler.waits, timedelta())] if step else []
            if complete is not None and complete not in checked:
                wrong += self._wrong_slots(complete)
                self._windows.drop_before(complete)
                checked.append(complete)
            self._live.optimize(step)
            scalars = SlotScalars(Progress(step, 0, 0), step, (), {}, random_state())
            self._windows.begin(step, scalars)
            self._capture.start()
            self._live.compute(step + 1)
            assert self._windows.captured_bytes == self._schedule.bytes_by_slot[_RANK][step % _W]
        return wrong, _W * len(checked)

    def _wrong_slots(self, window: Window) -> list[int]:
        steps = range(window.start, window.start + _W)
        return [step for step in steps if not self._is_state(step)]

    def _is_state(self, step: int) -> bool:
        record = self._ring.record(step)
        if record is None or self._ring.damaged_parts(record):
            return False
        part = record.part(EXTRAS)
        extras = self._ring.payload(record)[part.offset : part.offset + part.size_bytes]
        expected = TellingOperators()
        expected.optimize(step)
        if step:
            expected.compute(step)
        buffer = torch.frombuffer(self._ring.buffer(step), dtype=torch.uint8)
        scalars, digest = (
            SlotScalars.decode(bytes(extras)),
            expected.digest(Content.FULL if step % _W == _W - 1 else Content.COMPUTE),
        )
        if digest is None or (scalars.progress.committed, scalars.state) != (step, digest()):
            return False
        return all(
            torch.equal(view, piece.elements.to(piece.dtype))
            for layout_part in self._layouts[step % _W].parts
            for piece, view in zip(
                expected.pieces(layout_part.operator, layout_part.content),
                layout_part.views(buffer),
                strict=True,
            )
        )


def layouts_of(schedule: WindowSchedule, live: TellingOperators) -> tuple[SlotLayout, ...]:
    """Returns the layouts of operators that are none of a model."""
    return slot_layouts(schedule, _RANK, cast(LiveOperators, live))


def capture_windows(
    folder: str, steps: int, stream: LateStream
) -> tuple[list[int], int, list[float]]:
    """Captures the states of a job in a store of its own.

    Args:
        folder: of the store.
        steps: how many states.
        stream: that copies run on.

    Returns:
        What `CapturedWindows.run` returns, and how long steps waited, in seconds.
    """
    me = Session(b"the token of one process", 0, 1)
    with (
        StoreDirectory(Path(folder), StoreIdentity("run", "0"), 0) as store,
        SlotSender(me, {}, deadline=timedelta(seconds=5)) as sender,
        Capture(stream) as capture,
    ):
        windows = CapturedWindows(store, sender, capture)
        wrong, checked = windows.run(steps)
        return wrong, checked, [stall.total_seconds() for stall in windows.stalls]


def capture_over(folder: str, steps: int, link: Link) -> None:
    """Captures the states of a job whose slots another process keeps, too.

    Args:
        folder: of the stores.
        steps: how many states.
        link: to the other process.
    """
    token, identity = b"the token of two processes", StoreIdentity("run", "0")
    me, deadline = Session(token, 0, 1, Loopback(link)), timedelta(seconds=20)
    with (
        StoreDirectory(Path(folder), identity, 0) as store,
        StoreDirectory(Path(folder), identity, 1) as held,
    ):
        slots = StoredSlots(None)
        shape = RingShape.equal(ring_capacity(_W, 1), 1 << 16, 6)
        slots.keep(held.ring(RingRole.HELD, _RANK, shape))
        them = dataclasses.replace(me, process=1)
        with (
            ReplicaServer("127.0.0.1", them, slots, deadline=deadline) as server,
            SlotSender(me, {1: server.address}, deadline=deadline) as sender,
            Capture(LateStream(0)) as capture,
        ):
            CapturedWindows(store, sender, capture, holders=(1,)).run(steps)
