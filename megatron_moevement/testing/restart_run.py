"""A real job that goes through restarts within its processes.

Every rank leaves its training at a place of its own, all destroy their process groups and build new
ones, as after a fault. A rank that is lost builds everything anew, with other weights and an empty
store; the others keep their objects. Then the real loop is called again.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_moevement.backends.backend import Backend, choose, load
from megatron_moevement.integrations.megatron.process_groups import leave_job
from megatron_moevement.runtime.fault_points import FaultPoints
from megatron_moevement.runtime.generation import Generation
from megatron_moevement.runtime.ledger import loss_to_hex
from megatron_moevement.runtime.slots.store import process_folder
from megatron_moevement.settings.faults import Fault, Place
from megatron_moevement.settings.launch import Launch
from megatron_moevement.testing.localized_mutations import LOCALIZED_MUTATIONS
from megatron_moevement.training.arguments import Arguments, parse
from megatron_moevement.training.job import Job
from megatron_moevement.training.loop import train
from megatron_moevement.training.resident import Resident
from megatron_moevement.training.stop_request import StopSources


class InterruptedOnPurposeError(Exception):
    """A rank has come to the place where it leaves its training."""


class Interruptions(FaultPoints):
    """Fault points at which a rank leaves its training instead of dying."""

    def __init__(self, specs: Sequence[str]) -> None:
        """Arms one place in each generation.

        Args:
            specs: `STEP:PLACE` for the first generations, one after the other.
        """
        super().__init__()
        self._places = [Fault.parse(spec) for spec in specs]
        self._place: Fault | None = None

    def enter(self, rank: int, generation: int) -> None:
        """Arms the place of a generation."""
        del rank
        places = getattr(self, "_places", [])
        self._place = places[generation] if generation < len(places) else None

    def strike(self, step: int, place: Place) -> None:
        """Raises InterruptedOnPurposeError at the armed place."""
        armed = self._place
        if armed is not None and (step, place) == (armed.step, armed.place):
            raise InterruptedOnPurposeError(str(armed))


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

    def __init__(self, arguments: Arguments, backend: Backend, places: Sequence[str]) -> None:
        """Begins with nothing built.

        Args:
            arguments: of the job; they name the store's folder and the run.
            backend: of this process.
            places: where the rank leaves each generation.
        """
        self._arguments = arguments
        self._backend = backend
        self._launch = Launch.from_environment()
        self._faults = Interruptions(places)
        self._number = 0
        self._watched: set[int] = set()
        self.resident = Resident(arguments, backend, self._faults)
        self.job: Job | None = None
        self.passes = 0

    def train(self) -> int | None:
        """Trains to the end, or to a place; returns how far it came, None when interrupted."""
        try:
            with Generation(self._number) as generation:
                job = self.resident.enter(generation, self._launch)
                self._watch(job)
                self.passes = 0
                self.job, progress = train(job, StopSources(None), self.resident, generation)
                return progress.committed
        except InterruptedOnPurposeError:
            return None

    def restart(self, *, lost: bool) -> None:
        """Leaves the generation; every rank calls it, once it was interrupted.

        Args:
            lost: whether this rank loses all that it has.
        """
        gc.collect()
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        if store.add("left/arrived", 1) == dist.get_world_size():
            store.set("left/everybody", "")
        store.wait(["left/everybody"])
        self._number += 1
        self.resident.interruption.noticed_s = time.time()
        self.resident.leave()
        if lost:
            self._lose_everything()

    def _lose_everything(self) -> None:
        self.resident.close()
        faults = self._arguments.fault_tolerance
        root, run_id = faults.moevement_store_dir, faults.moevement_run_id
        assert root is not None
        assert run_id is not None
        shutil.rmtree(process_folder(Path(root), run_id, self._launch.rank))
        self.job = None
        self.resident = Resident(self._arguments, self._backend, self._faults)

    def _watch(self, job: Job) -> None:
        for chunk in job.chunks:
            if id(chunk) not in self._watched:
                self._watched.add(id(chunk))
                chunk.register_forward_pre_hook(self._count)

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
    planned = [Restart.of_document(document) for document in restarts]
    rank = Launch.from_environment().rank
    arguments = parse(flags, Launch.from_environment().world_size)
    backend = load(choose(arguments.run.moevement_backend))
    run = RestartRun(arguments, backend, [restart.places[rank] for restart in planned])
    try:
        for restart in planned:
            reached = run.train()
            place = restart.places[rank]
            assert reached is None, f"step {reached} was reached, {place} was not passed"
            run.restart(lost=rank in restart.lost)
        committed = run.train()
        assert run.job is not None
        return {
            "committed": committed,
            "digests": run.job.digests(),
            "losses": {str(k): loss_to_hex(v) for k, v in run.job.ledger.losses().items()},
            "passes": run.passes,
        }
    finally:
        run.resident.close()
        leave_job()
