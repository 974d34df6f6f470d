# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM keeps in a `torch_dist` checkpoint beside the weights, and how we read it.

Source of keys and forms: `save_checkpoint`, `load_checkpoint`, `generate_state_dict` and
`get_rng_state` of megatron/training/checkpointing.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy

from megatron_moevement.integrations.megatron import random_state
from megatron_moevement.integrations.megatron.unsharded_state import UnshardedState

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""`content_metadata` of our checkpoints: the one form that any layout loads."""

RANDOM_STATE = "rng_state"
"""The key of the random streams."""
VERSION = 3.0
"""`checkpoint_version`: the order of the rows of a QKV projection."""

_TYPE = "distrib_optim_sharding_type"
_ANY_LAYOUT = "fully_reshardable"
_BY_BUCKETS = "dp_reshardable"
_STREAMS = {
    "random_rng_state": "python",
    "np_rng_state": "numpy",
    "torch_rng_state": "host",
    "cuda_rng_state": "device",
    "rng_tracker_states": random_state.TRACKER,
}
"""By Megatron-LM's name of a random stream ours."""


class NothingUnsharded(LoadCommonStrategy):  # type: ignore[misc]  # upstream is not typed
    """Leaves the common state out of a load: it is read elsewhere, and has no tensor."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Returns nothing."""
        del checkpoint_dir
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Is not called: the format of tensors keeps these objects, too."""
        raise NotImplementedError

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Does nothing."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Does nothing."""


@contextlib.contextmanager
def data_alone() -> Iterator[None]:
    """Has torch load tensors and plain values alone, also where Megatron-Core asks for more."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def arguments_of(
    arguments: Mapping[str, Any], consumed_samples: int, *, has_random_streams: bool
) -> Namespace:
    """Returns `args` as a checkpoint of a job keeps them."""
    streams = {} if has_random_streams else {"no_save_rng": True}
    return Namespace(
        **{
            **arguments,
            **streams,
            "consumed_train_samples": consumed_samples,
            "consumed_valid_samples": 0,
            "skipped_train_samples": 0,
        }
    )


def metadata_of(common: UnshardedState) -> dict[str, Any]:
    """Returns what the forms of a checkpoint's state follow from.

    Checkpoints of Megatron-Core before 0.13 do not tell it; their arguments do.
    """
    told = common.entries.get("content_metadata")
    if told is not None:
        return dict(told)
    if not common.args.get("use_distributed_optimizer"):
        return {}
    parallel = common.args.get("ckpt_fully_parallel_save")
    return {_TYPE: "fully_sharded_model_space" if parallel else "dp_zero_gather_scatter"}


def misfit(common: UnshardedState) -> str | None:
    """Returns why the optimizer's state can't be loaded here, None where it can."""
    if common.args.get("no_save_optim") or "optimizer" not in common.entries:
        return "it has no optimizer state"
    kind = metadata_of(common).get(_TYPE, _ANY_LAYOUT)
    if kind in (_ANY_LAYOUT, _BY_BUCKETS):
        return None
    return f"its optimizer state is in the form {kind}, which is not covered"


def lies_in_buckets(common: UnshardedState) -> bool:
    """Returns whether the optimizer's state is kept as gradients lie in their buckets.

    Then it fits where buckets are the same; only the data-parallel size may be another.
    """
    return metadata_of(common).get(_TYPE) == _BY_BUCKETS


def request_metadata(common: UnshardedState) -> dict[str, Any]:
    """Returns with which metadata the optimizer's state is asked for."""
    alone = {"distrib_optim_fully_reshardable_mem_efficient": False}  # it decides how one is saved
    return {_TYPE: _ANY_LAYOUT, **metadata_of(common), **alone}


def other_layout(common: UnshardedState) -> str | None:
    """Returns the parallel sizes of a checkpoint where those of this job differ."""
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    told = {name: common.args.get(name) or 1 for name in sizes}
    if told == sizes:
        return None
    return " ".join(f"--{name.replace('_', '-')} {size}" for name, size in told.items())


def is_of_optimizer(key: str) -> bool:
    """Returns whether a tensor is of an optimizer, by its key in a checkpoint."""
    return re.match(r"(chained_\d+\.)?optimizer\.", key) is not None


def parts(optimizer: Any) -> list[Mapping[str, Any]]:
    """Returns the state of each chained optimizer; a single one is not numbered."""
    if not isinstance(optimizer, Mapping):
        return []
    numbered = [key for key in optimizer if isinstance(key, int)]
    return [optimizer[key] for key in sorted(numbered)] if numbered else [optimizer]


def applied_steps(optimizer: Any) -> int:
    """Returns the steps that Adam has counted.

    Raises:
        ValueError: its parameters count different ones.
    """
    counted = {int(step) for part in parts(optimizer) for step in _counters(part)}
    if len(counted) > 1:
        raise ValueError(f"its parameters count different optimizer steps: {sorted(counted)}")
    return counted.pop() if counted else 0


def _counters(part: Mapping[str, Any]) -> Iterator[Any]:
    inner = part.get("optimizer", part)  # FP32 without the distributed optimizer has no scaler
    common = inner.get("state", {}).get("common_step")
    if common is not None:
        yield common
    for group in inner.get("param_groups", ()):
        if group.get("step") is not None:
            yield group["step"]


def loss_scalers(optimizer: Any) -> list[dict[str, Any] | None]:
    """Returns the state of each part's loss scaler, None where there is none."""
    states = [part.get("grad_scaler") for part in parts(optimizer)]
    return [None if state is None else _numbers(state) for state in states]


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.item() if torch.is_tensor(value) else value for name, value in state.items()
    }


def sharded_random_state(*, is_loading: bool) -> ShardedObject:
    """Returns the random streams of this rank as Megatron-LM shards them.

    With expert parallelism each rank has its own; else the first data-parallel rank speaks for all.
    """
    own = None
    if not is_loading:
        streams = random_state.random_state()
        own = [{theirs: streams[name] for theirs, name in _STREAMS.items() if name in streams}]
    pp, tp = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return ShardedObject(RANDOM_STATE, own, (*sizes, size), (pp, tp, replica), replica_id=0)
    return ShardedObject(RANDOM_STATE, own, sizes, (pp, tp), replica_id=replica)


def has_random_state(common: UnshardedState) -> bool:
    """Returns whether a checkpoint has streams that go on in this job."""
    same = other_layout(common) is None and common.args.get("world_size") == dist.get_world_size()
    return same and not common.args.get("no_save_rng") and torch.cuda.is_available()


def restore_random_state(saved: list[Mapping[str, Any]]) -> None:
    """Takes the random streams that Megatron-LM saved."""
    (streams,) = saved
    random_state.restore_random_state({name: streams[key] for key, name in _STREAMS.items()})
