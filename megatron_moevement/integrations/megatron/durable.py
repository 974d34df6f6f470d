# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed checkpoint (`torch_dist`) of one training state, step by step.

Upstream's `dist_checkpointing.save` lets rank 0 fail alone while the others wait for it. Here its
parts run one after the other and all ranks agree on each, so that a full disk fails the save on
every rank and nothing else.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.megatron import megatron_checkpoint, random_state
from megatron_moevement.integrations.megatron.checkpoint_index import check_index
from megatron_moevement.integrations.megatron.megatron_checkpoint import METADATA
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.scheduler import Scheduler
from megatron_moevement.integrations.megatron.sharded_request import (
    alike_on_all_ranks,
    fetch,
    only_sharded,
    sharded_leaves,
    without_extra_state,
)
from megatron_moevement.integrations.megatron.sharded_writing import (
    SavedData,
    ShardedPart,
    plan_writing,
)
from megatron_moevement.integrations.megatron.unsharded_state import (
    COMMON_KEY,
    OWN_FORMAT,
    UnshardedState,
)
from megatron_moevement.runtime.coordination.agreement import (
    AgreementError,
    all_gather_json,
    on_first_rank,
    together,
)

BACKEND, VERSION = "torch_dist", 1
_LONGEST_REASON = 200
_GATHERED_BYTES = 3 * torch.float32.itemsize
"""Of a weight: master and moments, as upstream gathers them of the distributed optimizer."""


class UnloadableError(MoEvementError):
    """A checkpoint whose files are whole can't be loaded into this model; all ranks raise it."""


@dataclasses.dataclass(frozen=True)
class DurableState:
    """Everything of this rank that a durable checkpoint holds; all ranks call the same methods."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: SplitOptimizer
    scheduler: Scheduler
    layout: str
    """Names the parallel sizes; random streams are only taken from the same layout."""
    device: torch.device
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What Megatron-LM finds in `args`."""

    def save(
        self,
        folder: Path,
        common: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
        with_random_state: bool = True,
    ) -> None:
        """Writes the state into an empty folder.

        Args:
            common: what is the same on all ranks and JSON-like; its `progress` is Megatron-LM's
                iteration and consumed samples, too.
            with_optimizer: else it can only be loaded without.
            with_random_state: the same.

        Raises:
            AgreementError: on all ranks, if any rank could not write.
        """
        part, data = self.begin_save(
            *(folder, common), with_optimizer=with_optimizer, with_random_state=with_random_state
        )
        self.finish_save(folder, part, together(lambda: part.write(data), self.device))

    def begin_save(
        self,
        folder: Path,
        common: Mapping[str, Any],
        *,
        with_optimizer: bool = True,
        with_random_state: bool = True,
    ) -> tuple[ShardedPart, SavedData]:
        """Writes what all ranks have in common, and plans what each writes by itself.

        Takes and raises what `save` does.

        Returns:
            What this rank has to write, and the live tensors that it is made of.
        """
        self.optimizer.complete_parameters()
        state = self._sharded_state(
            is_loading=False, model_only=not with_optimizer, with_random_state=with_random_state
        )
        progress = common.get("progress", {})
        state["args"] = megatron_checkpoint.arguments_of(
            self.arguments,
            progress.get("consumed_samples", 0),
            has_random_streams=megatron_checkpoint.RANDOM_STATE in state,
        )
        state["iteration"] = progress.get("committed", 0)
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        state[COMMON_KEY] = {
            **common,
            "format": OWN_FORMAT,
            "scalers": list(self.optimizer.scalers()),
            "adam_step": self.optimizer.adam_step(),
            "layout": self.layout,
        }
        state["content_metadata"] = dict(METADATA)
        state["checkpoint_version"] = megatron_checkpoint.VERSION
        sharded, common_part = save_preprocess(
            state, preprocess_common_before_consistancy_check=alike_on_all_ranks
        )
        write_common = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1).save_common
        together(lambda: write_common(common_part, folder), self.device)
        gathers = not self.optimizer.is_state_whole
        return together(
            lambda: plan_writing(sharded, folder, self.device, has_gathered=gathers), self.device
        )

    def finish_save(self, folder: Path, part: ShardedPart, results: list[Any]) -> None:
        """Makes a checkpoint of what all ranks have written.

        Args:
            results: what `part.write` returned.

        Raises:
            AgreementError: on all ranks, if the first one could not write.
        """
        part.finish(results)
        config = CheckpointingConfig(BACKEND, VERSION)
        on_first_rank(lambda: save_config(config, str(folder)), self.device)

    def size_bytes(self) -> int:
        """Returns an upper bound of what this rank adds to a checkpoint, moments included.

        Of ranks that hold the same, one writes it.
        """
        writes = {
            "dense": parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
            "expert": parallel_state.get_expert_data_parallel_rank() == 0,
        }
        written = [
            parameter
            for chunk in self.chunks
            for parameter in chunk.parameters()
            if writes["dense" if getattr(parameter, "allreduce", True) else "expert"]
        ]
        weights = sum(parameter.nbytes for parameter in written)
        if not self.optimizer.is_state_whole:  # upstream gathers it to write it
            return int(weights + sum(_GATHERED_BYTES * each.numel() for each in written))
        optimizer = sum(
            value.nbytes
            for access in self.optimizer.masters
            for group in access.part.param_groups
            if writes["expert" if group.get("is_expert_parallel") else "dense"]
            for parameter in group["params"]
            for value in (parameter, *access.part.optimizer.state.get(parameter, {}).values())
            if isinstance(value, torch.Tensor)
        )
        return int(weights + optimizer)

    def load(
        self, folder: Path, common: UnshardedState, *, with_optimizer: bool, with_random_state: bool
    ) -> bool:
        """Fills model, optimizer, scheduler and random streams from a checkpoint.

        The checkpoint may come from other parallel sizes. Random streams belong to a rank, so they
        are only taken from the same layout.

        Args:
            common: of the checkpoint.

        Returns:
            Whether the random streams were taken.

        Raises:
            UnloadableError: it is another model's, or can't be read. The state is lost.
        """
        load = self._load if common.own is not None else self._load_megatrons
        try:
            together(lambda: check_index(folder), self.device)
            with megatron_checkpoint.data_alone():
                return load(folder, common, with_optimizer, with_random_state)
        except (CheckpointingException, AgreementError, UnpicklingError) as error:
            raise UnloadableError(_in_short(error)) from error
        except CheckpointException as error:  # torch's is no `Exception`
            causes = [cause for _, (cause, _) in sorted(error.failures.items())]
            if not all(isinstance(cause, Exception) for cause in causes):
                raise  # a rank was interrupted
            raise UnloadableError(_in_short(causes[0])) from error

    def _load(
        self, folder: Path, common: UnshardedState, with_optimizer: bool, with_random_state: bool
    ) -> bool:
        ours = common.own or {}
        with_random_state = with_random_state and ours["layout"] == self.layout
        request = self._sharded_state(
            is_loading=True, model_only=not with_optimizer, with_random_state=with_random_state
        )
        state = fetch(request, folder)
        self._take_model(state)
        if with_optimizer:
            self._take_optimizer(state["optimizer"], ours["adam_step"], ours["scalers"])
            self.scheduler.load_state_dict(common.entries["opt_param_scheduler"])
        else:
            self.optimizer.megatron.reload_model_params()
        if with_random_state:
            random_state.restore_random_state(state["random_state"])
        return with_random_state

    def _load_megatrons(
        self, folder: Path, common: UnshardedState, with_optimizer: bool, with_random_state: bool
    ) -> bool:
        with_random_state = with_random_state and megatron_checkpoint.has_random_state(common)
        metadata = megatron_checkpoint.request_metadata(common)
        request = self._sharded_state(
            is_loading=True,
            model_only=not with_optimizer,
            with_random_state=False,
            metadata=metadata,
        )
        request = without_extra_state(request)
        if with_random_state:
            request[megatron_checkpoint.RANDOM_STATE] = megatron_checkpoint.sharded_random_state(
                is_loading=True
            )
        saved = dist_checkpointing.load_tensors_metadata(str(folder))
        self._check_weights(request, saved)
        lies_in_buckets = megatron_checkpoint.lies_in_buckets(common)
        if with_optimizer and lies_in_buckets:
            self._check_buckets(request, saved)
        state = fetch(request, folder)
        self._take_model(state)
        if with_optimizer:
            counted = state["optimizer"] if lies_in_buckets else common.entries["optimizer"]
            steps = megatron_checkpoint.applied_steps(counted)
            scalers = megatron_checkpoint.loss_scalers(counted)
            self._take_optimizer(state["optimizer"], steps, scalers)
            self.scheduler.load_state_dict(common.entries["opt_param_scheduler"])
        else:
            self.optimizer.megatron.reload_model_params()
        if with_random_state:
            megatron_checkpoint.restore_random_state(state[megatron_checkpoint.RANDOM_STATE])
        return with_random_state

    def _take_model(self, state: Mapping[str, Any]) -> None:
        for key, chunk in self._named_chunks():
            chunk.load_state_dict(state[key])

    def _take_optimizer(
        self, state: Any, steps: int, scalers: Sequence[Mapping[str, Any] | None]
    ) -> None:
        """Takes the tensors, and the step and the scalers of the job; all else are its flags."""
        groups = [dict(group) for part in self.optimizer.parts for group in part.param_groups]
        self.optimizer.megatron.load_state_dict(state)
        live = (group for part in self.optimizer.parts for group in part.param_groups)
        for group, given in zip(live, groups, strict=True):
            group.update({name: given[name] for name in given.keys() - {"params"}})
        self.optimizer.complete_state()
        self.optimizer.set_adam_step(steps)
        self.optimizer.load_scalers(scalers)

    def _check_weights(self, request: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Refuses a checkpoint with weights that no rank asks for: upstream would leave them.

        Raises:
            UnloadableError: on all ranks.
        """
        own = sorted(
            {leaf.key for key, _ in self._named_chunks() for leaf in sharded_leaves(request[key])}
        )
        asked = {key for keys in all_gather_json(own, self.device) for key in keys}
        extra = sorted(
            key
            for key in saved
            if key not in asked and not megatron_checkpoint.is_of_optimizer(key)
        )
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise UnloadableError(f"this model has no weight {extra[0]}{more}")

    def _check_buckets(self, request: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Refuses an optimizer's state that lies in other buckets than those of this job.

        Raises:
            UnloadableError: on all ranks.
        """
        own = sorted(
            {
                (leaf.key, tuple(leaf.global_shape))
                for leaf in sharded_leaves(request["optimizer"])
                if isinstance(leaf, ShardedTensor)
            }
        )
        asked = {
            (key, tuple(shape)) for each in all_gather_json(own, self.device) for key, shape in each
        }
        there = {
            (key, tuple(tensor.global_shape))
            for key, tensor in saved.items()
            if megatron_checkpoint.is_of_optimizer(key)
        }
        if asked != there:
            raise UnloadableError(
                "its optimizer state lies in other buckets than here (dp_reshardable): give "
                "--no-load-optim to take its weights alone, or the parallel sizes and "
                "--overlap-grad-reduce that it was saved with"
            )

    def _named_chunks(self) -> list[tuple[str, torch.nn.Module]]:
        chunks = unwrap_model(list(self.chunks))
        if len(chunks) == 1:
            return [("model", chunks[0])]
        return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]

    def _sharded_state(
        self,
        *,
        is_loading: bool,
        model_only: bool,
        with_random_state: bool,
        metadata: Mapping[str, Any] = METADATA,
    ) -> dict[str, Any]:
        metadata = dict(metadata)
        state: dict[str, Any] = {}
        for key, chunk in self._named_chunks():
            state[key] = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        if not model_only:
            optimizer = self.optimizer.megatron.sharded_state_dict(
                dict(state), is_loading=is_loading, metadata=metadata
            )
            state["optimizer"] = only_sharded(optimizer) if is_loading else optimizer
        if with_random_state:
            state["random_state"] = ShardedObject(
                f"{COMMON_KEY}.random_state",
                None if is_loading else random_state.random_state(),
                (dist.get_world_size(),),
                (dist.get_rank(),),
                replica_id=0,
            )
            if not is_loading and torch.cuda.is_available():  # where Megatron-LM has its streams
                state[megatron_checkpoint.RANDOM_STATE] = megatron_checkpoint.sharded_random_state(
                    is_loading=False
                )
        return state


def _in_short(error: BaseException) -> str:
    """Returns what an exception says, without upstream's list of all names beside a missing one."""
    text = str(error.args[0] if isinstance(error, KeyError) else error) or type(error).__name__
    return textwrap.shorten(text.partition(": [")[0], _LONGEST_REASON, placeholder=" ...")
