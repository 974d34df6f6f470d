# SPDX-License-Identifier: Apache-2.0
"""What is asked of a checkpoint: state whose leaves say which part of which tensor they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
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

from megatron_moevement.integrations.megatron.megatron_checkpoint import (
    NothingUnsharded,
    is_of_optimizer,
)

_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""How upstream names master weights: with the distributed optimizer, and without it."""


def fetch(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a request with what the checkpoint has of it."""
    masters: dict[str, Any] = {}
    if "optimizer" in request:
        masters, request["optimizer"] = _find_masters(request["optimizer"], folder)
    no_common = NothingUnsharded()
    state = dist_checkpointing.load(request, str(folder), common_strategy=no_common)
    if masters:
        apart = {"masters": masters}
        loaded = dist_checkpointing.load(apart, str(folder), common_strategy=no_common)
        merge(state["optimizer"], loaded["masters"])
    return dict(state)


def without_extra_state(state: Any) -> Any:
    """Leaves out what TransformerEngine keeps beside its weights: it is empty without FP8."""
    if isinstance(state, dict):
        return {key: without_extra_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [without_extra_state(value) for value in state]
    if isinstance(state, ShardedObject) and state.key.endswith("._extra_state"):
        return LocalNonpersistentObject(state.data)
    return state


def alike_on_all_ranks(common: dict[str, Any]) -> dict[str, Any]:
    """Leaves out of a comparison what stages number differently; rank 0 speaks for them."""
    return {key: value for key, value in common.items() if key != "optimizer"}


def only_sharded(state: Any) -> Any:
    """Marks what is not sharded as this rank's own business, which is not loaded.

    Its form depends on the layout: experts with a group of their own have an own optimizer. What
    matters in it (step, scalers, schedule) is in our own part of the common state. The optimizer of
    a stage without experts has an empty state for theirs, which a checkpoint would drop.
    """
    if isinstance(state, ShardedBase):
        return state
    if isinstance(state, dict) and state:
        return {key: only_sharded(value) for key, value in state.items()}
    if isinstance(state, list) and sharded_leaves(state):
        return [only_sharded(value) for value in state]
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
    for leaf in sharded_leaves(state):
        asked = next((prefix for prefix in _MASTERS if leaf.key.startswith(prefix)), None)
        if asked is not None and asked not in saved:
            leaf.key = (saved[0] if saved else "") + leaf.key.removeprefix(asked)
    return extract_matching_values(state, _has_name_of_weight)  # type: ignore[no-any-return]


def _has_name_of_weight(value: Any) -> bool:
    return isinstance(value, ShardedBase) and not is_of_optimizer(value.key)


def sharded_leaves(state: Any) -> list[ShardedBase]:
    """Returns the tensors and objects of a state that are asked for."""
    return [leaf for leaf in nested_values([state]) if isinstance(leaf, ShardedBase)]


def _unwrapped(value: Any) -> Any:
    """Takes off the mark that upstream put on a part."""
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value
