"""A real job that goes through restarts within its processes.

Every rank leaves its training at a place of its own, all destroy their process groups and build new
ones, as after a fault. A rank that is lost builds everything anew, with other weights and an empty
store; the others keep their objects. Then the real loop is called again.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_moevement.integrations.megatron.group_references import GroupReferences
from megatron_moevement.integrations.megatron.process_groups import build_groups, leave_job
from megatron_moevement.integrations.megatron.random_state import seed_everything
from megatron_moevement.runtime.fault_points import FaultPoints
from megatron_moevement.runtime.ledger import loss_to_hex
from megatron_moevement.runtime.slots.store import process_folder
from megatron_moevement.settings.faults import Fault, Place
from megatron_moevement.strategies.kept import Kept
from megatron_moevement.testing.localized_mutations import LOCALIZED_MUTATIONS
from megatron_moevement.testing.tiny_job import tiny_job
from megatron_moevement.training import job as building
from megatron_moevement.training.job import Job
from megatron_moevement.training.loop import train
from megatron_moevement.training.stop_request import StopSources

_OTHER_SEED = 4711


class InterruptedOnPurposeError(Exception):
    """A rank has come to the place where it leaves its training."""


class Interruptions(FaultPoints):
    """Fault points at which a rank leaves its training instead of dying."""

    def __init__(self, specs: Sequence[str]) -> None:
        """Arms places, each as `STEP:PLACE`."""
        super().__init__()
        faults = [Fault.parse(spec) for spec in specs]
        self._places = {(fault.step, fault.place) for fault in faults}

    def strike(self, step: int, place: Place) -> None:
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


class RestartRun:
    """One rank of the job."""

    def __init__(self, job: Job) -> None:
        """Finds the process groups in the live objects.

        Args:
            job: the live objects; its flags name the store's folder and the run.
        """
        self.job = job
        self.kept = Kept()
        self.passes = 0
        self._generation = 0
        self._references = self._watched(job)

    def train(self, place: str | None) -> int | None:
        """Trains to the end, or to a place; returns how far it came, None when interrupted."""
        self.passes = 0
        job = dataclasses.replace(self.job, faults=Interruptions([place] if place else []))
        try:
            return train(job, StopSources(None), self.kept).committed
        except InterruptedOnPurposeError:
            return None

    def restart(self, *, lost: bool) -> None:
        """Gives all process groups new ones; every rank calls it, once it was interrupted.

        Args:
            lost: whether this rank loses all that it has.
        """
        gc.collect()
        store, world_size = dist.distributed_c10d._get_default_store(), dist.get_world_size()  # noqa: SLF001
        self._generation += 1
        name = f"restart{self._generation}"
        if store.add(f"{name}/arrived", 1) == world_size:
            store.set(f"{name}/everybody", "")
        store.wait([f"{name}/everybody"])
        if self._references is not None:
            self._references.release()
        leave_job()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
            rank=self.job.launch.rank,
            world_size=world_size,
        )
        arguments = self.job.arguments
        groups = build_groups(arguments.parallelism, int(arguments.architecture.num_layers or 0))
        # Building makes collectives of the whole job, so all build; survivors forget it again.
        seed_everything(_OTHER_SEED, self.job.position.pp)
        former = self.job
        built = building._build_part(  # noqa: SLF001  (what `build_job` does once it has joined)
            arguments, former.launch, former.backend, former.device, former.position, groups
        )
        if not lost:
            self._references.rebind()
            return
        faults = arguments.fault_tolerance
        root, run_id = faults.moevement_store_dir, faults.moevement_run_id
        assert root is not None
        assert run_id is not None
        shutil.rmtree(process_folder(Path(root), run_id, former.launch.rank))
        self.job, self.kept = built, Kept()
        self._references = self._watched(built)

    def _watched(self, job: Job) -> GroupReferences:
        references = GroupReferences(
            [job.chunks, job.optimizer, job.schedule, job.metrics, job.groups, job.durable]
        )
        for chunk in job.chunks:
            chunk.register_forward_pre_hook(self._count)
        return references

    def _count(self, *_: object) -> None:
        self.passes += 1


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
    LOCALIZED_MUTATIONS[mutation]()
    with tiny_job(*flags, base=()) as job:
        run = RestartRun(job)
        for document in restarts:
            restart = Restart.of_document(document)
            place = restart.places[job.launch.rank]
            reached = run.train(place)
            assert reached is None, f"step {reached} was reached, {place} was not passed"
            run.restart(lost=job.launch.rank in restart.lost)
        committed = run.train(None)
        return {
            "committed": committed,
            "digests": run.job.digests(),
            "losses": {str(k): loss_to_hex(v) for k, v in run.job.ledger.losses().items()},
            "passes": run.passes,
        }
