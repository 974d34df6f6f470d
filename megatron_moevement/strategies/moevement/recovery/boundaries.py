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
from megatron_moevement.strategies.moevement.protection.host_memory import DEADLINE, JobMemory
from megatron_moevement.strategies.trained import Trained

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


class Boundaries:
    """The boundaries of a rank's stage in one generation; the training thread calls it."""

    def __init__(self, trained: Trained, memory: JobMemory) -> None:
        """Starts the log's writer, where there is a log; closes it at the end.

        Args:
            trained: the live objects.
            memory: has the log, and the connections to peers.
        """
        self._trained = trained
        self._memory = memory
        self._config = trained.chunks[0].config
        self._stage = trained.rank.pp
        self._writer: LogWriter | None = None
        self._replaying: ReplayedBoundaries | None = None
        self._communicator: ReplayCommunicator | None = None
        self._reader: LogReader | None = None
        self._live: frozenset[Neighbour] | None = None
        self._fetched = 0
        self._mode = contextlib.ExitStack()
        self._talk = contextlib.ExitStack()
        if memory.log is not None:
            log = memory.log
            self._writer = memory.generation.own(
                lambda: open_writer(log, trained.backend, trained.copy_stream())
            )

    def train(self) -> None:
        """Logs what is sent in training from now on."""
        self._talk.close()
        self._mode.close()
        self._replaying = self._communicator = self._reader = None
        if self._writer is not None:
            group = self._trained.groups.pp
            self._communicate(LoggedCommunicator(group, self._config, self._writer))

    def replay(self, replayed: ReplayedBoundaries, first: int) -> None:
        """Takes what the stages ahead sent from their logs, until training goes on.

        Args:
            replayed: who replays.
            first: the first step that is replayed.
        """
        self._talk.close()
        self._mode.close()
        if self._writer is None:
            if first <= replayed.target:
                raise DisagreementError(f"step {first} can't be replayed alone without a log")
            return
        session, peers = self._memory.session, self._memory.peers
        assert session is not None
        self._replaying, self._fetched = replayed, first - 1
        self._reader = self._mode.enter_context(
            self._memory.generation.own(
                lambda: LogReader(
                    session, peers, deadline=DEADLINE, max_bytes=self._trained.log_bytes
                )
            )
        )
        self._live = None
        self.advance(first)
        self._prefetch(first)

    def advance(self, step: int) -> None:
        """Gets ready for a replayed step: a neighbour that was ahead may replay it, too."""
        replayed, layout = self._replaying, self._trained.layout
        if replayed is None or self._writer is None or step > replayed.target:
            return
        senders = {side: sender_stage(layout, self._stage, way) for way, side in _SIDES.items()}
        live = frozenset(
            side
            for side, sender in senders.items()
            if sender is not None and replayed.does(sender, step)
        )
        if live == self._live:
            return
        self._live = live
        self._communicator = ReplayCommunicator(
            self._trained.groups.pp,
            self._config,
            self._writer,
            self._logged,
            device=self._trained.device,
            live=live,
        )
        self._talk.close()
        self._communicate(self._communicator)

    def verify(self, step: int) -> Verification | None:
        """Compares what a replayed step sent to bystanders with what they received before.

        Returns:
            None when nothing is replayed alone.
        """
        if self._communicator is None or self._replaying is None or self._reader is None:
            return None
        receivers = {
            way: stage
            for way, stage in receivers_from(self._trained.layout, self._stage)
            if not self._replaying.does(stage, step)
        }
        hashes: dict[BoundaryTag, int] = {}
        for stage in set(receivers.values()):
            hashes |= self._reader.received(self._replaying.processes[stage], step)
        return self._communicator.verify(step, hashes.get, tuple(receivers))

    def await_landed(self) -> timedelta:
        """Waits until the log has everything that was sent; returns how long that took."""
        return timedelta() if self._writer is None else self._writer.await_landed()

    def logged_bytes(self, step: int) -> int:
        """Returns the bytes of a step's tensors in the log."""
        log = self._memory.log
        return 0 if log is None else sum(one.data.nbytes for one in log.sent(step).values())

    def close(self) -> None:
        """Ends the threads, once the log has what was handed over."""
        self._talk.close()
        self._mode.close()
        if self._writer is not None:
            self._writer.close()

    def _communicate(self, communicator: LoggedCommunicator) -> None:
        self._talk.enter_context(self._trained.schedule.communicating_by(communicator))

    def _logged(self, tag: BoundaryTag) -> torch.Tensor:
        """Returns what a bystander sent; asks for what the step after will need."""
        assert self._reader is not None
        assert self._replaying is not None
        self._prefetch(tag.step + 1)
        return self._reader.take(self._process_of(tag), tag)

    def _prefetch(self, step: int) -> None:
        assert self._reader is not None
        assert self._replaying is not None
        if not self._fetched < step <= self._replaying.target:
            return
        self._fetched = step
        crossings = crossings_of(
            self._config, self._trained.layout.pp, self._trained.schedule.num_microbatches
        )
        for way, sender in senders_to(self._trained.layout, self._stage):
            if not self._replaying.does(sender, step):
                tags = crossings.received(step, self._stage, way)
                self._reader.prefetch(self._replaying.processes[sender], tags)

    def _process_of(self, tag: BoundaryTag) -> int:
        assert self._replaying is not None
        return self._replaying.processes[tag.sender % self._trained.layout.pp]
