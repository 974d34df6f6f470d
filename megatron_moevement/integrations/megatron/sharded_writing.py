# SPDX-License-Identifier: Apache-2.0
"""The sharded part of a checkpoint: planned by all ranks, written by each, finished by the first.

These are upstream's steps, one by one, so that ranks agree on each of them, and what a rank writes
by itself can be written beside training. Upstream's own asynchronous writer forks: a copy of a
process with many threads keeps its connections and its locks, so that neither peers nor a relaunch
would notice the end of the process. A thread ends with it, and torch writes tensors without the
interpreter's lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_moevement.integrations.megatron.megatron_checkpoint import is_of_optimizer
from megatron_moevement.runtime.coordination.agreement import on_first_rank


class SavedData(Protocol):
    """Has what a plan's items stand for."""

    def resolve_data(self, write_item: WriteItem, /) -> Any:
        """Returns the tensor or the bytes of an item."""


class CopiedData:
    """What a rank writes, in host memory, as it was when the copy was made."""

    def __init__(self, part: ShardedPart, data: SavedData) -> None:
        """Copies from device or host what the job goes on with.

        Bytes, and what was gathered for this save, have been made for it already.
        """
        self._items: Mapping[MetadataIndex, Any] = {
            item.index: _copy(part, item, data.resolve_data(item)) for item in part.plan.items
        }

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the copy."""
        return self._items[write_item.index]


def _copy(part: ShardedPart, item: WriteItem, value: Any) -> Any:
    if item.type is WriteItemType.BYTE_IO:
        return value
    tensor: torch.Tensor = value.detach()
    if not tensor.is_cpu:
        return tensor.cpu()
    is_gathered = part.has_gathered and is_of_optimizer(item.index.fqn)
    return tensor if is_gathered else tensor.clone()


class _GuardedData:
    """Data whose writing can be given up before each item."""

    def __init__(self, data: SavedData, proceed: Callable[[], None]) -> None:
        self._data = data
        self._proceed = proceed

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._proceed()
        return self._data.resolve_data(write_item)


class _Writer(FileSystemWriter):
    """Torch's writer of files; upstream's planning leaves here what is to be written."""

    planner: SavePlanner

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Takes the planner, which has the live tensors."""
        del plan
        self.planner = planner


@dataclasses.dataclass(frozen=True)
class ShardedPart:
    """What this rank writes of the sharded part, and what the first rank finishes.

    Attributes:
        metadata: of the whole checkpoint, on the first rank.
        has_gathered: whether the optimizer's state was gathered for this save alone.
    """

    writer: FileSystemWriter
    plan: SavePlan
    metadata: Metadata | None
    device: torch.device
    has_gathered: bool

    @property
    def prefix(self) -> str:
        """Begins the names of this rank's files."""
        return str(self.plan.storage_data.prefix)

    def write(self, data: SavedData, proceed: Callable[[], None] = lambda: None) -> list[Any]:
        """Writes this rank's file; any thread, without collectives.

        Args:
            data: of the plan.
            proceed: is called before each item; what it raises ends the writing.

        Returns:
            What was written where, for `finish`.
        """
        proceed()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins on GPU 0
        guarded: Any = _GuardedData(data, proceed)
        results: list[WriteResult] = self.writer.write_data(self.plan, guarded).wait()
        return results

    def finish(self, results: list[Any]) -> None:
        """Writes the index, when all ranks have written; every rank calls it, in step.

        Raises:
            AgreementError: on all ranks: the first one could not write it.
        """
        is_first = dist.get_rank() == 0
        gathered: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(results, gathered)
        metadata = self.metadata

        def finish() -> None:
            assert metadata is not None
            assert gathered is not None
            self.writer.finish(metadata, gathered)

        on_first_rank(finish, self.device)


def plan_writing(
    state: dict[str, Any], folder: Path, device: torch.device, *, has_gathered: bool
) -> tuple[ShardedPart, SavedData]:
    """Plans what each rank writes into a folder; every rank calls it, in step.

    Args:
        has_gathered: whether the optimizer's state was gathered for this save alone.

    Returns:
        This rank's part, and its data: the live tensors.

    Raises:
        OSError: on all ranks: the folder can't be written on one of them.
    """
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(state, keep_only_main_replica=True)
    writer = _Writer(folder, sync_files=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    try:
        (_, metadata, _), plan, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(state, is_loading=False), writer, planner=planner
        )
    except CheckpointException as error:  # torch's is no `Exception` and ends what lets it pass
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise OSError(f"rank {rank} could not write into {folder}: {cause}") from error
    data = writer.planner
    del writer.planner
    return ShardedPart(writer, plan, metadata, device, has_gathered), data
