# SPDX-License-Identifier: Apache-2.0
"""Saving of a job: every rank calls each method in the same step, unless it says otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.integrations.megatron.durable import DurableState
from megatron_moevement.integrations.megatron.sharded_writing import (
    CopiedData,
    SavedData,
    ShardedPart,
)
from megatron_moevement.runtime.coordination.agreement import (
    AgreementError,
    all_gather_json,
    as_user_error,
    on_first_rank,
    together,
)
from megatron_moevement.runtime.faults.fault_points import NO_FAULTS, FaultPoints
from megatron_moevement.settings.checkpointing import Checkpointing
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.training.checkpoints import (
    CheckpointFolder,
    FileRecord,
    checkpoint_files,
    record_file,
)

_SPARE_BYTES = 16 << 20
"""Room that a save leaves for the small files beside the tensors."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What a rank has written by itself.

    Attributes:
        results: for `DurableState.finish_save`.
        files: of this rank, read back.
    """

    results: list[Any]
    files: Mapping[str, FileRecord]


@dataclasses.dataclass(frozen=True)
class BegunSave:
    """A checkpoint that all ranks have begun, and what this one writes of it by itself."""

    iteration: int
    folder: Path
    part: ShardedPart

    def write(self, data: SavedData, proceed: Callable[[], None] = lambda: None) -> Written:
        """Writes this rank's part and reads it back; any thread, without collectives.

        Args:
            data: of the part.
            proceed: is called on the way; what it raises ends the writing.
        """
        results = self.part.write(data, proceed)
        own = self.folder.glob(f"{self.part.prefix}*")
        return Written(results, {path.name: record_file(path) for path in own})


@dataclasses.dataclass(eq=False)
class CheckpointSaving:
    """Writes the durable checkpoints of a job."""

    settings: Checkpointing
    state: DurableState
    model: dict[str, Any]
    """Describes the model; a checkpoint of another model is refused."""
    device: torch.device
    faults: FaultPoints = NO_FAULTS
    run: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tells whose checkpoints they are (`identity.checkpoint_mark`)."""

    @property
    def _saves(self) -> CheckpointFolder | None:
        """The folder `--save`."""
        return None if self.settings.save is None else CheckpointFolder(Path(self.settings.save))

    def check_writable(self) -> None:
        """Checks at start that `--save` can be written.

        Raises:
            UserError: it can't.
        """
        if (folder := self._saves) is None:
            return
        with as_user_error(f"--save {self.settings.save} is not writable: "):
            on_first_rank(folder.check_writable, self.device)

    def save(self, iteration: int, common: Mapping[str, Any]) -> str | None:
        """Saves S_iteration; a failure leaves earlier checkpoints and the training untouched.

        Returns:
            None, or why it failed.
        """

        def save() -> None:
            begun, data = self._begin(iteration, common)
            self._finish(begun, together(lambda: begun.write(data), self.device))

        return self._tried(iteration, save)

    def begin(
        self, iteration: int, common: Mapping[str, Any]
    ) -> tuple[BegunSave, CopiedData] | str:
        """Begins to save S_iteration, of which each rank gets a copy to write by itself.

        Returns:
            What is begun, or why it failed.
        """
        found: list[tuple[BegunSave, CopiedData]] = []

        def begin() -> None:
            begun, data = self._begin(iteration, common)
            found.append((begun, together(lambda: CopiedData(begun.part, data), self.device)))

        failure = self._tried(iteration, begin)
        return found[0] if failure is None else failure

    def finish(self, begun: BegunSave, take: Callable[[], Written]) -> str | None:
        """Gives a checkpoint its name, when all ranks have written their parts.

        Args:
            take: returns what this rank has written, or raises why it could not.

        Returns:
            None, or why it failed.
        """
        return self._tried(
            begun.iteration, lambda: self._finish(begun, together(take, self.device))
        )

    def _tried(self, iteration: int, action: Callable[[], None]) -> str | None:
        """Returns why a step of a save has failed, of which nothing is left then."""
        try:
            action()
        except AgreementError as error:
            if dist.get_rank() == 0 and self._saves is not None:
                self._saves.abandon(iteration)
            return str(error)
        return None

    def _begin(self, iteration: int, common: Mapping[str, Any]) -> tuple[BegunSave, SavedData]:
        folder = self._saves
        assert folder is not None
        on_first_rank(lambda: folder.begin(iteration), self.device)
        writing = folder.writing(iteration)
        needed = self._needed_bytes()
        on_first_rank(lambda: check_space(writing, needed), self.device)
        left_out = self.settings.left_out
        marks = {"iteration": iteration, "model": self.model, "run": self.run}
        part, data = self.state.begin_save(
            writing,
            {**common, **marks, "left_out": list(left_out)},
            with_optimizer="optim" not in left_out,
            with_random_state="rng" not in left_out,
        )
        return BegunSave(iteration, writing, part), data

    def _finish(self, begun: BegunSave, written: Written) -> None:
        folder = self._saves
        assert folder is not None
        self.state.finish_save(begun.folder, begun.part, written.results)
        records = self._records(begun.folder, written.files)
        self.faults.strike(begun.iteration, FaultPoint.SAVE)
        on_first_rank(lambda: folder.commit(begun.iteration, records), self.device)
        self._retain(folder, begun.iteration)

    def _records(self, folder: Path, own: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Returns the records of all files: those of no rank the first one reads back."""
        merged: dict[str, FileRecord] = {}
        for records in all_gather_json(
            {name: vars(each) for name, each in own.items()}, self.device
        ):
            merged |= {name: FileRecord(**record) for name, record in records.items()}

        def record_rest() -> None:
            rest = [name for name in checkpoint_files(folder) if name not in merged]
            merged.update({name: record_file(folder / name) for name in rest})

        on_first_rank(record_rest, self.device)
        return merged

    def _retain(self, folder: CheckpointFolder, newest: int) -> None:
        """Removes what need not be kept; what can't be removed now, a later save removes."""
        interval = self.settings.save_retain_interval
        if interval is not None and dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                folder.retain(interval, newest)

    def _needed_bytes(self) -> int:
        own = all_gather_json(self.state.size_bytes(), self.device)
        return int(sum(own)) + _SPARE_BYTES


def check_space(folder: Path, needed_bytes: int, to_be_freed_bytes: int = 0) -> None:
    """Raises OSError when a folder has no room."""
    free = shutil.disk_usage(folder).free + to_be_freed_bytes
    if free < needed_bytes:
        raise OSError(f"{folder}: {needed_bytes} bytes are needed and {free} are free")
