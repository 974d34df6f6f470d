# SPDX-License-Identifier: Apache-2.0
"""Boundaries: how a generation sends over stage boundaries, in training and in a replay."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from datetime import timedelta

import torch

from megatron_moevement.integrations.megatron.boundary_log import LoggedCommunicator, crossings_of
from megatron_moevement.integrations.megatron.boundary_replay import (
    Neighbour,
    ReplayCommunicator,
    Verification,
)
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction, sender_stage
from megatron_moevement.policy.job.segments import receivers_from, senders_to
from megatron_moevement.runtime.coordination.commit_barrier import DisagreementError
from megatron_moevement.runtime.peers.log_reader import LogReader
from megatron_moevement.runtime.upstream_log.log_writer import LogWriter, open_writer
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory

_SIDES = {Direction.FORWARD: Neighbour.PREVIOUS, Direction.BACKWARD: Neighbour.NEXT}
"""From where a stage receives what goes in a direction."""


@dataclasses.dataclass(frozen=True)
class ReplayedBoundaries:
    """Between whom a replay of some stages takes place.

    Attributes:
        begins: for each stage k of the S_k that it replays from; the target where it stands by.
        processes: for each stage the process whose rank has this rank's other coordinates.
        target: the last step that is replayed.
    """

    begins: Mapping[int, int]
    processes: Mapping[int, int]
    target: int

    def does(self, stage: int, step: int) -> bool:
        """Returns whether a stage replays a step; what it sent in it lies in its log otherwise."""
        return self.begins[stage] < step


class _Apart:
    """The boundaries of a stage that replays while others stand by, or are at other steps."""

    def __init__(
        self,
        objects: LiveObjects,
        writer: LogWriter,
        reader: LogReader,
        replayed: ReplayedBoundaries,
        first: int,
    ) -> None:
        self._objects = objects
        self._writer = writer
        self._reader = reader
        self._replayed = replayed
        self._config = objects.chunks[0].config
        self._stage = objects.rank.pp
        self._fetched = first - 1
        self._live = self._live_in(first)
        self.communicator = self._communicator()
        self._prefetch(first)

    def advances(self, step: int) -> bool:
        """Returns whether another communicator takes over for a step, as a neighbour joins it."""
        live = self._live if step > self._replayed.target else self._live_in(step)
        if live == self._live:
            return False
        self._live = live
        self.communicator = self._communicator()
        return True

    def verify(self, step: int) -> Verification:
        """Compares what a replayed step sent to bystanders with what they received before."""
        receivers = {
            way: stage
            for way, stage in receivers_from(self._objects.layout, self._stage)
            if not self._replayed.does(stage, step)
        }
        hashes: dict[BoundaryTag, int] = {}
        for stage in set(receivers.values()):
            hashes |= self._reader.received(self._replayed.processes[stage], step)
        return self.communicator.verify(step, hashes.get, tuple(receivers))

    def _live_in(self, step: int) -> frozenset[Neighbour]:
        """Returns the neighbours that replay a step, too."""
        layout = self._objects.layout
        senders = {side: sender_stage(layout, self._stage, way) for way, side in _SIDES.items()}
        return frozenset(
            side
            for side, sender in senders.items()
            if sender is not None and self._replayed.does(sender, step)
        )

    def _communicator(self) -> ReplayCommunicator:
        return ReplayCommunicator(
            self._objects.groups.pp,
            self._config,
            self._writer,
            self._logged,
            device=self._objects.device,
            live=self._live,
        )

    def _logged(self, tag: BoundaryTag) -> torch.Tensor:
        """Returns what a bystander sent; asks for what the step after will need."""
        self._prefetch(tag.step + 1)
        process = self._replayed.processes[tag.sender % self._objects.layout.pp]
        return self._reader.take(process, tag)

    def _prefetch(self, step: int) -> None:
        if not self._fetched < step <= self._replayed.target:
            return
        self._fetched = step
        crossings = crossings_of(
            self._config, self._objects.layout.pp, self._objects.schedule.num_microbatches
        )
        for way, sender in senders_to(self._objects.layout, self._stage):
            if not self._replayed.does(sender, step):
                tags = crossings.received(step, self._stage, way)
                self._reader.prefetch(self._replayed.processes[sender], tags)


class Boundaries:
    """The boundaries of a rank's stage in one generation; the training thread calls it."""

    def __init__(self, objects: LiveObjects, memory: HostMemory) -> None:
        """Starts the log's writer, where there is a log; closes it at the end."""
        self._objects = objects
        self._memory = memory
        self._writer: LogWriter | None = None
        self._apart: _Apart | None = None
        self._mode = contextlib.ExitStack()
        self._talk = contextlib.ExitStack()
        if memory.log is not None:
            log = memory.log
            self._writer = memory.generation.own(
                lambda: open_writer(log, objects.backend, objects.copy_stream())
            )

    def train(self) -> None:
        """Logs what is sent in training from now on."""
        self._end()
        if self._writer is not None:
            group, config = self._objects.groups.pp, self._objects.chunks[0].config
            self._communicate(LoggedCommunicator(group, config, self._writer))

    def replay(self, replayed: ReplayedBoundaries, first: int) -> None:
        """Takes what the stages ahead sent from their logs, until training goes on.

        Args:
            replayed: who replays.
            first: the first step that is replayed.
        """
        self._end()
        if self._writer is None:
            if first <= replayed.target:
                raise DisagreementError(f"step {first} can't be replayed alone without a log")
            return
        if first > replayed.target:
            return
        reader = self._mode.enter_context(self._memory.log_reader(self._objects.log_bytes))
        self._apart = _Apart(self._objects, self._writer, reader, replayed, first)
        self._communicate(self._apart.communicator)

    def advance(self, step: int) -> None:
        """Gets ready for a replayed step: a neighbour that was ahead may replay it, too."""
        if self._apart is not None and self._apart.advances(step):
            self._talk.close()
            self._communicate(self._apart.communicator)

    def verify(self, step: int) -> Verification | None:
        """Compares what a replayed step sent to bystanders with what they received before.

        Returns:
            None when nothing is replayed alone.
        """
        return None if self._apart is None else self._apart.verify(step)

    def await_landed(self) -> timedelta:
        """Waits until the log has everything that was sent; returns how long that took."""
        return timedelta() if self._writer is None else self._writer.await_landed()

    @property
    def log_s(self) -> float:
        """Time that writing the log took until now."""
        return 0.0 if self._writer is None else self._writer.spent_s

    def logged_bytes(self, step: int) -> int:
        """Returns the bytes of a step's tensors in the log."""
        log = self._memory.log
        return 0 if log is None else sum(one.data.nbytes for one in log.sent(step).values())

    def close(self) -> None:
        """Ends the threads, once the log has what was handed over."""
        self._end()
        if self._writer is not None:
            self._writer.close()

    def _end(self) -> None:
        self._talk.close()
        self._mode.close()
        self._apart = None

    def _communicate(self, communicator: LoggedCommunicator) -> None:
        self._talk.enter_context(self._objects.schedule.communicating_by(communicator))
