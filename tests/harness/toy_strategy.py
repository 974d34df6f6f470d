# SPDX-License-Identifier: Apache-2.0
"""The training program with one more strategy: `--moevement-strategy=toy`, all of it in this file.

After each step every rank writes all of its state into a file and keeps the last two. A recovery
takes all ranks back to the newest step of which each of them has a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.policy.recovery.lifecycle import Event
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.coordination.progress import START, Progress
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.registry import STRATEGIES, Registered, register
from megatron_moevement.strategies.resident_state import Protected, ResidentState
from megatron_moevement.strategies.scalars import SlotScalars
from megatron_moevement.strategies.strategy import Covered, Recovered, StartOver, Strategy
from megatron_moevement.training.program import main

TOY = "toy"
_KEPT = 2
"""No rank commits a step before all have finished the step before: they are one step apart."""


class DenseSnapshots(Strategy):
    """Writes all of a rank's state after every step."""

    def __init__(self, objects: LiveObjects, folder: Path, generation: Generation) -> None:
        """Begins with the files that a rank of this name left.

        Args:
            objects: the live objects.
            folder: of the run.
            generation: in which it protects the job.
        """
        self._generation = generation
        self._objects = objects
        self._folder = folder / str(objects.rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._progress = START
        self._is_wanted = True

    def recover(self, durable: Durable) -> Recovered | StartOver:
        """Brings all ranks back to one step, where that is newer than a checkpoint."""
        files = {int(file.stem): file for file in self._folder.glob("*.state")}
        held = all_gather_json(sorted(files), self._objects.device)
        newest = max(set(files).intersection(*held), default=0)
        self._objects.transients.reset()
        if newest <= durable.newest(is_continuing=any(held)):
            return StartOver(self._begin, is_continuing=any(held))
        self._generation.advance(Event.AGREED)
        self._generation.advance(Event.SETTLED)
        return self._restore(files[newest])

    def _begin(self, progress: Progress) -> None:
        """Forgets what lies here."""
        del progress
        self._forget()

    def commit(self, entry: LedgerEntry, progress: Progress, covered: Covered) -> None:
        """Notes what `after_step` writes."""
        del entry, covered
        self._progress = progress

    def after_step(self) -> None:
        """Writes the state, whole or not at all."""
        live = LiveOperators(self._objects.chunks, self._objects.optimizer)
        state = {
            "operators": {
                str(one.id): [piece.elements for piece in live.pieces(one.id, Content.FULL)]
                for one in live.operators
            },
            "scalars": self._objects.scalars(self._progress).encode().decode(),
            "losses": self._objects.ledger.losses(),
        }
        step = self._progress.committed
        file = self._folder / f"{step}.state"
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)
        (self._folder / f"{step - _KEPT}.state").unlink(missing_ok=True)

    def finish(self) -> None:
        """Lets `close` remove the files."""
        self._is_wanted = False

    def close(self) -> None:
        """Leaves the files to the next generation or launch, if there is to be one."""
        if not self._is_wanted:
            self._forget()

    def _restore(self, file: Path) -> Recovered:
        state, objects = torch.load(file), self._objects
        scalars = SlotScalars.decode(state["scalars"].encode())
        live = LiveOperators(objects.chunks, objects.optimizer)
        for one in live.operators:
            live.put_back(one.id, Content.FULL, state["operators"][str(one.id)])
        live.set_step([one.id for one in live.operators], scalars.adam_step)
        objects.optimizer.set_group_steps(scalars.adam_step)
        objects.restore(scalars)
        live.complete()
        objects.ledger.restore_losses(state["losses"])
        return Recovered(scalars.progress, scalars.progress.committed)

    def _forget(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()


class Toy(ResidentState):
    """Keeps nothing but the flags: all else is in files."""

    def __init__(self, settings: FaultTolerance) -> None:
        """Takes the flags."""
        super().__init__()
        self._settings = settings

    def open(self, protected: Protected) -> DenseSnapshots:
        """Returns what protects a job, with files beside those of other strategies."""
        objects = protected.objects()
        root, run_id = store_place(self._settings, objects.identity)
        folder = root / f"{run_id}.{objects.identity.fingerprint[:8]}"
        return DenseSnapshots(objects, folder, protected.generation)


if TOY not in STRATEGIES:
    register(TOY, Registered(Toy))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
