# SPDX-License-Identifier: Apache-2.0
"""Resuming of a job, which also saves: every rank calls each method in the same step."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.durable import UnloadableError
from megatron_moevement.integrations.megatron.megatron_checkpoint import misfit as optimizer_misfit
from megatron_moevement.integrations.megatron.unsharded_state import (
    UnshardedState,
    read_unsharded_state,
)
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.runtime.coordination.agreement import (
    all_gather_json,
    as_user_error,
    on_first_rank,
)
from megatron_moevement.training.checkpoint_saving import CheckpointSaving, check_space
from megatron_moevement.training.checkpoints import CheckpointFolder
from megatron_moevement.training.megatron_checkpoints import (
    check_loadable,
    damage_without_list,
    own_part_of,
    what_was_taken,
)

_HISTORY_BYTES = mmap.PAGESIZE
"""The file that names the history of training is written before the first save."""


class CheckpointStore(CheckpointSaving):
    """The durable checkpoints of a job."""

    def check_room(self, train_iters: int) -> None:
        """Checks at start that `--save` has room for one checkpoint, unless none is to come.

        Raises:
            UserError: it hasn't.
        """
        if (folder := self._saves) is None:
            return
        needed = self._needed_bytes()

        def check() -> None:
            if next(iter(self._loadable()), 0) < train_iters:
                check_space(folder.root, needed + _HISTORY_BYTES, folder.left_over_bytes())

        with as_user_error(
            f"--save {folder.root} has no room for a checkpoint: ",
            "; make room or give another folder",
        ):
            on_first_rank(check, self.device)

    def begin_history(self) -> None:
        """Begins a history of training: what is in `--save` already was saved by others.

        Raises:
            UserError: it can't be written down.
        """
        if (folder := self._saves) is None:
            return
        with as_user_error(f"can't write to --save {folder.root}: "):
            on_first_rank(folder.begin_history, self.device)

    def newest(self) -> Durable:
        """Returns what `resume` would go on from, as all ranks see it."""
        loadable, saved = self._seen_by_all(self._loadable(), self._saved())
        return Durable(next(iter(loadable), 0), next(iter(saved), 0))

    def _loadable(self) -> list[int]:
        """Returns the iterations in `--load` that this rank sees, best first."""
        if self.settings.load is None or self.settings.finetune:
            return []
        candidates = self._candidates(CheckpointFolder(Path(self.settings.load)))
        wanted = self.settings.ckpt_step
        return [k for k in candidates if wanted in {None, k}]

    def _candidates(self, folder: CheckpointFolder) -> list[int]:
        """Returns the iterations to resume from, best first: none that this job saves in part."""
        found = folder.candidates()
        if not self.settings.left_out or self._saves is None:
            return found
        if folder.root.resolve() != self._saves.root.resolve():
            return found
        return [k for k in found if k not in self._saves.of_history()]

    def _saved(self) -> list[int]:
        """Returns the iterations in `--save` that this history has saved and this rank sees.

        None where they lack a part: no recovery goes on from them.
        """
        if self._saves is None or self.settings.left_out:
            return []
        return self._saves.of_history()

    def _seen_by_all(self, *lists: Sequence[int]) -> list[list[int]]:
        """Returns of each list what every rank sees: not all see the newest name at once."""
        seen = all_gather_json([list(each) for each in lists], self.device)
        return [
            [k for k in own if all(k in each for each in others)]
            for own, others in zip(lists, zip(*seen, strict=True), strict=True)
        ]

    def resume(
        self, warn: Callable[[str], None], *, is_continuing: bool = False
    ) -> dict[str, Any] | None:
        """Loads the newest whole checkpoint of `--load`, or a newer one that this job has saved.

        Args:
            warn: told about what was passed over.
            is_continuing: whether the job has trained before, so that its own saves count.

        Returns:
            The common part of the checkpoint, None when training begins with step 1.

        Raises:
            UserError: there is no whole checkpoint where one must be, or it is another model's or
                can't be loaded.
        """
        if is_continuing and (common := self._resume_own(warn)) is not None:
            return common
        if self.settings.load is None:
            return None
        folder = CheckpointFolder(Path(self.settings.load))
        iteration = self._choose(folder, warn)
        if iteration is None:
            if self.settings.exit_on_missing_checkpoint:
                raise UserError(f"--load {folder.root} holds no checkpoint")
            return None
        finetune = self.settings.finetune
        common = self._load(
            folder,
            iteration,
            warn,
            with_optimizer=not (finetune or self.settings.no_load_optim),
            with_random_state=not (finetune or self.settings.no_load_rng),
        )
        return None if finetune else common

    def _resume_own(self, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """Loads what this history of training has saved, where `--load` has nothing as new."""
        if (folder := self._saves) is None:
            return None
        loadable, saved = self._seen_by_all(self._loadable(), self._saved())
        newer = itertools.takewhile(lambda k: k > next(iter(loadable), 0), saved)
        iteration = self._first_whole(folder, newer, warn)
        return None if iteration is None else self._load(folder, iteration, warn)

    def _load(
        self,
        folder: CheckpointFolder,
        iteration: int,
        warn: Callable[[str], None],
        *,
        with_optimizer: bool = True,
        with_random_state: bool = True,
    ) -> dict[str, Any]:
        path = folder.path(iteration)
        common = read_unsharded_state(path)
        if common is None:
            raise UserError(f"checkpoint {path} can't be read")
        check_loadable(path, common, self.model)
        is_release = common.own is None and folder.is_release(iteration)
        if is_release:  # weights alone, from a converter
            with_optimizer = with_random_state = False
        wanted = {"optim": with_optimizer, "rng": with_random_state}
        self._check_parts(path, common, wanted)
        try:
            has_random_state = self.state.load(
                path, common, with_optimizer=with_optimizer, with_random_state=with_random_state
            )
        except UnloadableError as error:
            raise UserError(
                f"checkpoint {path} can't be loaded: {error}; give the flags of "
                "the job that saved it, or another --load"
            ) from error
        if common.own is not None:
            if with_random_state and not has_random_state:
                warn(
                    f"checkpoint {path} was written with other parallel sizes: "
                    "its random streams are not taken, dropout goes on from --seed"
                )
            return common.own
        steps = self.state.optimizer.adam_step() if with_optimizer else None
        own = own_part_of(common, steps, is_release=is_release)
        position = not (self.settings.finetune or is_release)
        parts = {"optimizer": with_optimizer, "random_state": has_random_state}
        warn(what_was_taken(path, own, **parts, position=position))
        return own

    def _check_parts(self, path: Path, common: UnshardedState, wanted: Mapping[str, bool]) -> None:
        """Checks that a checkpoint has what is to be loaded of it.

        Raises:
            UserError: it lacks a part, or has it in a form that does not fit.
        """
        left_out = () if common.own is None else common.own.get("left_out", ())
        for name in (name for name in left_out if wanted[name]):
            raise UserError(
                f"checkpoint {path} was saved with --no-save-{name}: give --no-load-{name}, or "
                "another --load"
            )
        if common.own is None and wanted["optim"]:
            misfit = optimizer_misfit(common)
            if misfit is not None:
                raise UserError(
                    f"checkpoint {path} is Megatron-LM's, and {misfit}: --no-load-optim takes its "
                    "weights alone"
                )

    def _choose(self, folder: CheckpointFolder, warn: Callable[[str], None]) -> int | None:
        with as_user_error(f"--load {folder.root} can't be made whole: "):
            on_first_rank(folder.recover, self.device)
        (candidates,) = self._seen_by_all(self._candidates(folder))
        if self.settings.ckpt_step is not None:
            candidates = [k for k in candidates if k == self.settings.ckpt_step]
            if not candidates:
                raise UserError(f"--ckpt-step {self.settings.ckpt_step}: not in {folder.root}")
        iteration = self._first_whole(folder, candidates, warn)
        if candidates and iteration is None:
            raise UserError(
                f"--load {folder.root}: none of its {len(candidates)} checkpoints is whole; "
                "give another folder, or none to start from the initial weights"
            )
        return iteration

    def _first_whole(
        self, folder: CheckpointFolder, candidates: Iterable[int], warn: Callable[[str], None]
    ) -> int | None:
        """Returns the first checkpoint without damage, of which each rank reads a share."""
        for iteration in candidates:
            found = all_gather_json(_damage(folder, iteration), self.device)
            damage = next((one for one in found if one), None)
            if damage is None:
                return iteration
            warn(f"checkpoint {folder.path(iteration)} is not usable: {damage}")
        return None


def _damage(folder: CheckpointFolder, iteration: int) -> str | None:
    """Returns what is wrong with this rank's share of a checkpoint's files."""
    manifest = folder.manifest(iteration)
    if manifest is None:
        return damage_without_list(folder.path(iteration))
    return folder.damage(iteration, sorted(manifest)[dist.get_rank() :: dist.get_world_size()])
