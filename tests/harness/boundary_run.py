# SPDX-License-Identifier: Apache-2.0
"""A real job that logs its stage boundaries, and stages of it that are replayed alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.integrations.megatron.boundary_log import LoggedCommunicator, log_bytes
from megatron_moevement.integrations.megatron.boundary_replay import (
    Neighbour,
    ReplayCommunicator,
    Verification,
)
from megatron_moevement.integrations.megatron.inventory import operator_states
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.pipeline_schedule import MicroBatch
from megatron_moevement.integrations.megatron.random_state import (
    random_state,
    restore_random_state,
)
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.runtime.upstream_log.log_writer import LogWriter, open_writer
from megatron_moevement.training.job import Job
from megatron_moevement.training.step import TrainStep
from tests.harness.frozen_step import (
    Values,
    differences,
    random_streams,
    tensors,
)

_UNUSABLE = 7777.0


@dataclasses.dataclass(frozen=True)
class StageState:
    """Everything of one rank that decides later bits."""

    step: int
    operators: Mapping[str, Values]
    random: dict[str, Any]
    scalers: tuple[Any, ...]
    schedule: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a rank of the same pipeline gives to a replay."""

    sent: Mapping[BoundaryTag, torch.Tensor]
    hashes: Mapping[BoundaryTag, int]
    received: Mapping[BoundaryTag, int]


def open_log(job: Job, max_steps: int) -> UpstreamLog:
    """Returns an empty log that has room for this rank's steps."""
    return UpstreamLog(
        max_steps=max_steps,
        step_bytes=log_bytes(
            job.chunks[0].config,
            stage=job.position.pp,
            pp=job.position.pp_size,
            num_microbatches=job.batches.num_microbatches,
            micro_batch_size=job.batches.micro_batch_size,
            seq_length=int(job.arguments.data.seq_length),
        ),
        pin=job.backend.pin,
    )


class BoundaryRun:
    """Trains a job with its log on, and replays stages of it."""

    def __init__(self, job: Job, step: TrainStep, max_steps: int) -> None:
        """Binds the job; `passes` counts forward passes.

        Args:
            job: the live objects.
            step: trains.
            max_steps: of the log.
        """
        self.log = open_log(job, max_steps)
        self.passes = 0
        self.unlike_losses: list[int] = []
        self._job = job
        self._step = step
        self._batches: dict[int, list[MicroBatch]] = {}
        self._read = step.micro_batches
        step.micro_batches = self._recorded
        for chunk in job.chunks:
            chunk.register_forward_pre_hook(self._count)

    @contextlib.contextmanager
    def writer(self) -> Iterator[LogWriter]:
        """Yields a writer of the log."""
        backend = self._job.backend
        with open_writer(self.log, backend.name, backend.copy_stream()) as writer:
            yield writer

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Logs what is trained within the block."""
        job = self._job
        with self.writer() as writer:
            communicator = LoggedCommunicator(job.groups.pp, job.chunks[0].config, writer)
            with job.schedule.communicating_by(communicator):
                yield
                writer.await_landed()

    def train(self, steps: int) -> None:
        """Trains; every rank calls it."""
        for _ in range(steps):
            self._step.run(StopRequest.NONE)

    def state(self) -> StageState:
        """Returns a copy of this rank's state; all ranks of a stage call it."""
        self._job.optimizer.complete_parameters()
        return StageState(
            step=self._step.progress.committed,
            operators={
                str(state.operator): {name: one.detach().clone() for name, one in tensors(state)}
                for state in operator_states(self._job.chunks, self._job.optimizer)
            },
            random=random_state(),
            scalers=self._job.optimizer.scalers(),
            schedule=self._job.scheduler.state_dict(),
        )

    @torch.no_grad()
    def restore(self, saved: StageState) -> None:
        """Brings a state back over the ruins of the present one."""
        for state in operator_states(self._job.chunks, self._job.optimizer):
            for name, tensor in tensors(state):
                tensor.fill_(_UNUSABLE)
                tensor.copy_(saved.operators[str(state.operator)][name])
        self._job.optimizer.load_scalers(saved.scalers)
        self._job.scheduler.load_state_dict(saved.schedule)
        restore_random_state(saved.random)

    def unlike(self, expected: StageState) -> list[str]:
        """Returns what of the present state, or of a replayed loss, is not as expected."""
        now = self.state()
        found = [f"loss of step {step}" for step in self.unlike_losses]
        found += [
            f"{operator} {name}"
            for operator, values in now.operators.items()
            for name in differences(values, expected.operators[operator])
        ]
        found += ["scalers"] if now.scalers != expected.scalers else []
        found += ["schedule"] if now.schedule != expected.schedule else []
        same_streams = random_streams(now.random) == random_streams(expected.random)
        return found + ([] if same_streams else ["random streams"])

    def peers(self) -> list[Peer]:
        """Gathers the logs of the ranks of this rank's pipeline, by stage; all ranks call it."""
        steps = self.log.steps
        tensors = {tag: one for step in steps for tag, one in self.log.sent(step).items()}
        own = Peer(
            sent={tag: self.log.serve(tag).clone() for tag in tensors},
            hashes={tag: one.hash for tag, one in tensors.items()},
            received={tag: one for step in steps for tag, one in self.log.received(step).items()},
        )
        peers: list[Any] = [None] * self._job.position.pp_size
        dist.all_gather_object(peers, own, group=self._job.groups.pp)
        return peers

    def replay(
        self, peers: list[Peer], steps: range, segment: range | None = None
    ) -> list[Verification]:
        """Replays steps of a segment from its neighbours' logs; only its own ranks call it.

        Args:
            peers: the logs.
            steps: which.
            segment: the stages that replay together; None for this rank's stage alone.
        """
        stage = self._job.position.pp
        sides = {Neighbour.PREVIOUS: stage - 1, Neighbour.NEXT: stage + 1}
        live = [side for side, other in sides.items() if segment and other in segment]
        sent = {tag: one for peer in peers for tag, one in peer.sent.items()}
        received = {tag: one for peer in peers for tag, one in peer.received.items()}
        found = []
        with self.writer() as writer:
            communicator = ReplayCommunicator(
                self._job.groups.pp,
                self._job.chunks[0].config,
                writer,
                sent.__getitem__,
                device=self._job.device,
                live=live,
            )
            with self._job.schedule.communicating_by(communicator):
                for step in steps:
                    self._replay_step(step)
                    found.append(communicator.verify(step, received.get))
        return found

    def _replay_step(self, number: int) -> None:
        job, entry = self._job, self._job.ledger[number]
        assert random_streams(random_state()) == random_streams(entry.random_state)
        assert job.optimizer.loss_scale() == entry.loss_scale
        assert job.scheduler.parameter_groups() == entry.groups
        loss = job.schedule.forward_backward(self._batches[number], step=number)
        if loss is not None and loss.mean != entry.loss:
            self.unlike_losses.append(number)
        statistics = GradientStatistics(found_inf=entry.found_inf, norm=entry.grad_norm)
        applied = job.optimizer.commit(job.optimizer.prepare(statistics))
        job.expert_bias.commit()
        if applied:
            job.scheduler.advance(job.batches.global_batch_size)
        job.optimizer.gather()
        job.optimizer.complete_parameters()

    def _recorded(self) -> list[MicroBatch]:
        batches = list(self._read())
        self._batches[self._step.progress.committed + 1] = batches
        return batches

    def _count(self, *_: object) -> None:
        self.passes += 1
