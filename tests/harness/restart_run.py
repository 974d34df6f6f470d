# SPDX-License-Identifier: Apache-2.0
"""A real job that goes through restarts within its processes.

Every rank leaves its training at a place of its own, all destroy their process groups and build new
ones, as after a fault. A rank that is lost builds everything anew, with other weights and an empty
store; the others keep their objects. Then the real loop is called again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_moevement.backends.backend import choose, load
from megatron_moevement.integrations.megatron.process_groups import leave_job
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.ledger import loss_to_hex
from megatron_moevement.runtime.coordination.rejoin_barrier import RejoinBarrier
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.runtime.stores.store import process_folder
from megatron_moevement.settings.faults import Fault, FaultPoint
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.moevement.recovery import rejoin as returning
from megatron_moevement.training.job import Job
from megatron_moevement.training.loop import train
from megatron_moevement.training.resident import Resident
from megatron_moevement.training.state_digest import state_digests
from megatron_moevement.training.stop_request import StopSources
from tests.harness.localized_mutations import LOCALIZED_MUTATIONS
from tests.harness.localized_run import STANDS_BY
from tests.harness.state_mutations import STATE_MUTATIONS
from tests.harness.tiny_job import tiny_arguments

_PATIENCE = timedelta(seconds=60)


class InterruptedOnPurposeError(Exception):
    """A rank has come to the place where it leaves its training."""


class Interruptions(FaultPoints):
    """Fault points at which a rank leaves its training instead of dying."""

    def __init__(self, specs: Sequence[str]) -> None:
        """Arms places, each as `STEP:PLACE`."""
        super().__init__()
        faults = [Fault.parse(spec) for spec in specs]
        self._places = {(fault.step, fault.place) for fault in faults}

    def strike(self, step: int, place: FaultPoint) -> None:
        """Raises InterruptedOnPurposeError at an armed place."""
        if (step, place) in self._places:
            raise InterruptedOnPurposeError(f"{step}:{place.value}")


@dataclasses.dataclass(frozen=True)
class Restart:
    """How a generation ends.

    Attributes:
        places: for each rank, by number, where it leaves its training.
        lost: the ranks that lose everything.
    """

    places: Mapping[int, str]
    lost: frozenset[int]

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Restart:
        """Returns the restart of a JSON object."""
        places = {int(rank): place for rank, place in document["places"].items()}
        return cls(places, frozenset(document["lost"]))


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a rank ends with: its step, the digest of each operator, and all losses."""

    committed: int
    digests: Mapping[str, str]
    losses: Mapping[int, float]


class RestartRun:
    """One process of the job, which occupies the same rank in all generations."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Builds nothing yet.

        Args:
            flags: all flags of the job; they name the store's folder and the run.
        """
        self._launch = Launch.from_environment()
        self._arguments = tiny_arguments(*flags, world_size=self._launch.world_size, base=())
        self._backend = load(choose(self._arguments.run.moevement_backend))
        self._resident = Resident(self._arguments, self._backend)
        self._is_new = False
        self._number = 0
        self.passes = 0

    @property
    def rank(self) -> int:
        """The rank that this process occupies."""
        return self._launch.rank

    def train(self, place: str | None) -> Ended | None:
        """Trains a generation to the end, or to a place.

        Returns:
            What the rank ends with; None when it was interrupted.
        """
        self.passes = 0
        self._number += 1
        generation = Generation(self._number - 1)
        try:
            with generation, self._leaving(place == STANDS_BY):
                joined = self._resident.enter(generation, self._launch)
                if self._is_new:
                    _change_weights(joined)
                    self._is_new = False
                faults = Interruptions([place] if place not in {None, STANDS_BY} else [])
                hooks = [each.register_forward_pre_hook(self._count) for each in joined.chunks]
                job = dataclasses.replace(joined, faults=faults)
                ending = train(job, StopSources(None), self._resident, generation)
                progress = ending.progress
                return Ended(progress.committed, state_digests(job, progress), job.ledger.losses())
        except InterruptedOnPurposeError:
            for hook in hooks:
                hook.remove()
            return None

    @contextlib.contextmanager
    def _leaving(self, is_bystander: bool) -> Iterator[None]:
        """Lets a bystander leave where it waits for who replays, once they have left."""
        name = f"left{self._number}"

        class Left(RejoinBarrier):
            def wait(self) -> None:
                RejoinBarrier(name, _PATIENCE).wait()
                raise InterruptedOnPurposeError(STANDS_BY)

        if is_bystander:
            setattr(returning, "RejoinBarrier", Left)  # noqa: B010  (mypy: a class is no variable)
        try:
            yield
        finally:
            setattr(returning, "RejoinBarrier", RejoinBarrier)  # noqa: B010

    def restart(self, restart: Restart) -> None:
        """Leaves the groups of a generation; every rank calls it, once it was interrupted.

        Args:
            restart: what is lost, and who has left already.
        """
        lost = self.rank in restart.lost
        if STANDS_BY in restart.places.values() and restart.places[self.rank] != STANDS_BY:
            RejoinBarrier(f"left{self._number}", _PATIENCE).wait()
        gc.collect()
        everybody = RejoinBarrier(f"restart{self._number}", _PATIENCE)
        everybody.wait()
        self._resident.leave()
        if not lost:
            return
        faults = self._arguments.fault_tolerance
        root, run_id = faults.moevement_store_dir, faults.moevement_run_id
        assert root is not None
        assert run_id is not None
        self._resident.close()
        shutil.rmtree(process_folder(Path(root), run_id, self._launch.process))
        self._resident = Resident(self._arguments, self._backend)
        self._is_new = True

    def close(self) -> None:
        """Leaves the job."""
        leave_job(_PATIENCE)
        self._resident.close()

    def _count(self, *_: object) -> None:
        self.passes += 1


@torch.no_grad()
def _change_weights(job: Job) -> None:
    """Lets nothing come from the weights that a new process builds."""
    for chunk in job.chunks:
        for parameter in chunk.parameters():
            parameter.add_(1)
    for part in job.optimizer.parts:
        for group in [] if part.is_stub_optimizer else part.optimizer.param_groups:
            for master in group["params"]:
                master.add_(1)


def train_through(
    flags: Sequence[str], restarts: Sequence[Mapping[str, Any]], mutation: str = "do-nothing"
) -> dict[str, Any]:
    """Trains a job through restarts to its end, on one rank.

    Args:
        flags: all flags of the job.
        restarts: one after the other, as JSON.
        mutation: what the rank does wrongly.

    Returns:
        The digest of each operator, the losses, and the forward passes of the last generation.
    """
    {**LOCALIZED_MUTATIONS, **STATE_MUTATIONS}[mutation]()
    run = RestartRun(flags)
    for document in restarts:
        restart = Restart.of_document(document)
        place = restart.places[run.rank]
        assert run.train(place) is None, f"{place} was not passed"
        run.restart(restart)
    ended = run.train(None)
    run.close()
    assert ended is not None
    return {
        "committed": ended.committed,
        "digests": ended.digests,
        "losses": {str(step): loss_to_hex(loss) for step, loss in ended.losses.items()},
        "passes": run.passes,
    }
