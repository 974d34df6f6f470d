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
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.megatron import random_state
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.own_part import COMMON_KEY
from megatron_moevement.integrations.megatron.scheduler import Scheduler
from megatron_moevement.runtime.coordination.agreement import on_first_rank, together

BACKEND, VERSION = "torch_dist", 1
_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""How upstream names master weights: with the distributed optimizer, and without it."""

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}

_LONGEST_REASON = 200


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
            common: what is the same on all ranks and JSON-like.
            with_optimizer: else it can only be loaded without.
            with_random_state: the same.

        Raises:
            AgreementError: on all ranks, if any rank could not write.
        """
        self.optimizer.complete_parameters()
        state = self._sharded_state(
            is_loading=False, model_only=not with_optimizer, with_random_state=with_random_state
        )
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        state[COMMON_KEY] = {
            **common,
            "scalers": list(self.optimizer.scalers()),
            "adam_step": self.optimizer.adam_step(),
            "layout": self.layout,
        }
        state["content_metadata"] = dict(_METADATA)
        state["checkpoint_version"] = 3.0
        sharded, common_part = save_preprocess(state)
        write_common = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1).save_common
        together(lambda: write_common(common_part, folder), self.device)
        together(lambda: _write_sharded(sharded, folder), self.device)

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
        weights = sum(
            parameter.nbytes
            for chunk in self.chunks
            for parameter in chunk.parameters()
            if writes["dense" if getattr(parameter, "allreduce", True) else "expert"]
        )
        optimizer = sum(
            value.nbytes
            for access in self.optimizer.masters
            for group in access.part.param_groups
            if access.is_sharded  # each rank has a shard of its own
            or writes["expert" if group.get("is_expert_parallel") else "dense"]
            for parameter in group["params"]
            for value in (parameter, *access.part.optimizer.state.get(parameter, {}).values())
            if isinstance(value, torch.Tensor)
        )
        return int(weights + optimizer)

    @staticmethod
    def read_common(folder: Path) -> dict[str, Any]:
        """Returns our part of a checkpoint's common state, without loading anything else."""
        common = dist_checkpointing.load_common_state_dict(str(folder))
        return dict(common[COMMON_KEY])

    def load(self, folder: Path, *, with_optimizer: bool, with_random_state: bool) -> bool:
        """Fills model, optimizer, scheduler and random streams from a checkpoint.

        The checkpoint may come from other parallel sizes. Random streams belong to a rank, so they
        are only taken from the same layout.

        Returns:
            Whether the random streams were taken.

        Raises:
            UnloadableError: it is another model's, or can't be read. The state is lost.
        """
        try:
            return self._load(folder, with_optimizer, with_random_state)
        except CheckpointingException as error:
            raise UnloadableError(_in_short(error)) from error
        except CheckpointException as error:  # torch's is no `Exception`
            causes = [cause for _, (cause, _) in sorted(error.failures.items())]
            if not all(isinstance(cause, Exception) for cause in causes):
                raise  # a rank was interrupted
            raise UnloadableError(_in_short(causes[0])) from error

    def _load(self, folder: Path, with_optimizer: bool, with_random_state: bool) -> bool:
        ours = self.read_common(folder)
        with_random_state = with_random_state and ours["layout"] == self.layout
        request = self._sharded_state(
            is_loading=True, model_only=not with_optimizer, with_random_state=with_random_state
        )
        masters: dict[str, Any] = {}
        if with_optimizer:
            masters, request["optimizer"] = _find_masters(request["optimizer"], folder)
        state = dist_checkpointing.load(request, str(folder))
        if masters:
            loaded = dist_checkpointing.load({"masters": masters}, str(folder))
            merge(state["optimizer"], loaded["masters"])
        for key, chunk in self._named_chunks():
            chunk.load_state_dict(state[key])
        if with_optimizer:
            self.optimizer.megatron.load_state_dict(state["optimizer"])
            self.optimizer.complete_state()
            self.optimizer.set_adam_step(ours["adam_step"])
            self.optimizer.load_scalers(ours["scalers"])
            self.scheduler.load_state_dict(state["opt_param_scheduler"])
        else:
            self.optimizer.megatron.reload_model_params()
        if with_random_state:
            random_state.restore_random_state(state["random_state"])
        return with_random_state

    def _named_chunks(self) -> list[tuple[str, torch.nn.Module]]:
        chunks = unwrap_model(list(self.chunks))
        if len(chunks) == 1:
            return [("model", chunks[0])]
        return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]

    def _sharded_state(
        self, *, is_loading: bool, model_only: bool, with_random_state: bool
    ) -> dict[str, Any]:
        metadata = dict(_METADATA)
        state: dict[str, Any] = {}
        for key, chunk in self._named_chunks():
            state[key] = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        if not model_only:
            optimizer = self.optimizer.megatron.sharded_state_dict(
                dict(state), is_loading=is_loading, metadata=metadata
            )
            state["optimizer"] = _only_sharded(optimizer)
        if with_random_state:
            state["random_state"] = ShardedObject(
                f"{COMMON_KEY}.random_state",
                None if is_loading else random_state.random_state(),
                (dist.get_world_size(),),
                (dist.get_rank(),),
                replica_id=0,
            )
        return state


def _only_sharded(state: Any) -> Any:
    """Marks what is not sharded as this rank's own business, neither saved nor loaded.

    Its form depends on the layout: experts with a group of their own have an own optimizer. What
    matters in it (step, scalers, schedule) is in our own part of the common state. The optimizer of
    a stage without experts has an empty state for theirs, which a checkpoint would drop.
    """
    if isinstance(state, ShardedBase):
        return state
    if isinstance(state, dict) and state:
        return {key: _only_sharded(value) for key, value in state.items()}
    if isinstance(state, list) and _sharded_leaves(state):
        return [_only_sharded(value) for value in state]
    return LocalNonpersistentObject(dict_list_map_outplace(_unwrapped, state))


def _find_masters(state: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Asks for the FP32 master weights by the names that a checkpoint has them under.

    Upstream names them differently with and without the distributed optimizer, and in FP32 without
    it the weights themselves are the masters.

    Returns:
        What of the optimizer's state must be loaded apart because its names are the weights', and
        the rest.
    """
    names = dist_checkpointing.load_tensors_metadata(str(folder))
    saved = [prefix for prefix in _MASTERS if any(name.startswith(prefix) for name in names)]
    for leaf in _sharded_leaves(state):
        asked = next((prefix for prefix in _MASTERS if leaf.key.startswith(prefix)), None)
        if asked is not None and asked not in saved:
            leaf.key = (saved[0] if saved else "") + leaf.key.removeprefix(asked)
    return extract_matching_values(state, _has_name_of_weight)  # type: ignore[no-any-return]


def _has_name_of_weight(value: Any) -> bool:
    return isinstance(value, ShardedBase) and not value.key.startswith("optimizer.")


def _sharded_leaves(state: Any) -> list[ShardedBase]:
    return [leaf for leaf in nested_values([state]) if isinstance(leaf, ShardedBase)]


def _unwrapped(value: Any) -> Any:
    """Takes off the mark that upstream put on a part."""
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value


def _in_short(error: BaseException) -> str:
    """Returns what an exception says, without upstream's list of all names beside a missing one."""
    text = str(error.args[0] if isinstance(error, KeyError) else error) or type(error).__name__
    return textwrap.shorten(text.partition(": [")[0], _LONGEST_REASON, placeholder=" ...")


def _write_sharded(state: dict[str, Any], folder: Path) -> None:
    """Writes the sharded part in upstream's format, in this process.

    Upstream's own writer hands it to a process that it keeps for ever, and that starts by importing
    the program again.

    Raises:
        OSError: on all ranks, if one could not write.
    """
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(state, keep_only_main_replica=True)
    try:
        save_distributed(
            mcore_to_pyt_state_dict(state, is_loading=False),
            storage_writer=FileSystemWriter(folder, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
    except CheckpointException as error:  # torch's is no `Exception` and ends what lets it pass
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise OSError(f"rank {rank} could not write into {folder}: {cause}") from error
