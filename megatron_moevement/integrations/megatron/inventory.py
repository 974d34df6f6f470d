# SPDX-License-Identifier: Apache-2.0
"""Which weight, master weight, moment, counter and buffer of a rank belongs to which operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.policy.job.operators import OperatorId, OperatorKind

TRANSIENT_BUFFERS = frozenset({"local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"})
"""Buffers of the routers that are zero at every step's end: counters, not state."""


@dataclasses.dataclass(frozen=True)
class OperatorState:
    """The live state of one operator on this rank, by name; nothing is copied."""

    operator: OperatorId
    compute: Mapping[str, torch.Tensor]
    """Compute weights and persistent buffers, by their name in the model."""
    kept: Mapping[str, Mapping[str, Any]]
    """What the optimizer keeps of each parameter, tensors or numbers, by the keys of the recipe.

    With the distributed optimizer, this rank's shard; parameters without one are left out.
    """

    @property
    def optimizer(self) -> Mapping[str, torch.Tensor | float]:
        """Master weights, moments and steps, by the parameter's name and their key."""
        return {
            f"{name}.{key}": value
            for name, state in self.kept.items()
            for key, value in state.items()
        }


def operator_of_parameters(chunk: GPTModel) -> Iterator[tuple[str, torch.Tensor, OperatorId]]:
    """Yields name, tensor and operator of every parameter and persistent buffer of a chunk.

    Raises:
        AssertionError: a tensor belongs to no operator or to two.
    """
    owners: dict[str, OperatorId] = {}
    for prefix, module in chunk.named_modules():
        if isinstance(module, TransformerLayer):
            layer = module.layer_number - 1
            _claim(owners, prefix, module, OperatorId(OperatorKind.NON_EXPERT, layer))
            if isinstance(module.mlp, MoELayer):
                _claim_experts(owners, f"{prefix}.mlp", module.mlp, layer)
    for name, tensor in _persistent_tensors(chunk):
        yield name, tensor, owners.get(name) or _outside_of_layers(name)


def _claim(
    owners: dict[str, OperatorId], prefix: str, module: torch.nn.Module, operator: OperatorId
) -> None:
    owners.update((f"{prefix}.{name}", operator) for name, _ in _persistent_tensors(module))


def _claim_experts(owners: dict[str, OperatorId], prefix: str, moe: MoELayer, layer: int) -> None:
    """Takes gate and routed experts out of their layer; shared experts stay in it."""
    _claim(owners, f"{prefix}.router", moe.router, OperatorId(OperatorKind.GATE, layer))
    for local, expert in enumerate(moe.local_expert_indices):
        operator = OperatorId(OperatorKind.EXPERT, layer, expert)
        for name, _ in _persistent_tensors(moe.experts):
            if _local_expert(name) == local:
                owners[f"{prefix}.experts.{name}"] = operator


def _local_expert(name: str) -> int | None:
    """Returns the local expert of a parameter of the experts' module.

    Sequential and grouped experts say `local_experts.3.linear_fc1.weight`, TransformerEngine's
    grouped linear says `linear_fc1.weight3`.
    """
    parts = name.split(".")
    if parts[0] == "local_experts":
        return int(parts[1])
    digits = parts[-1].removeprefix("weight").removeprefix("bias")
    return int(digits) if digits.isdigit() else None


def _outside_of_layers(name: str) -> OperatorId:
    if name.startswith("embedding."):
        return OperatorId(OperatorKind.EMBEDDING)
    if name.startswith(("output_layer.", "decoder.final_layernorm.")):
        return OperatorId(OperatorKind.HEAD)
    raise AssertionError(f"{name} belongs to no operator")


def _persistent_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] not in TRANSIENT_BUFFERS and buffer is not None:
            yield name, buffer


def _state_of_masters(optimizer: SplitOptimizer) -> dict[int, dict[str, Any]]:
    """Returns what the optimizer keeps, by the ids of the master weights."""
    recipe = optimizer.recipe
    return {
        id(master): {
            # apex and TransformerEngine count per group
            **{key: group[key] for key in (recipe.counter,) if key in group},
            **part.optimizer.state.get(master, {}),
            recipe.master.key: master,
        }
        for part in optimizer.parts
        for group in part.param_groups
        for master in group["params"]
    }


def operator_states(
    chunks: Sequence[torch.nn.Module], optimizer: SplitOptimizer
) -> list[OperatorState]:
    """Returns the state of every operator of this rank, in the order of their names.

    Every parameter of the optimizer must belong to exactly one operator.

    Raises:
        AssertionError: the optimizer holds a parameter that no operator has, or the model one that
            no optimizer has.
    """
    states = _state_of_masters(optimizer)
    compute: dict[OperatorId, dict[str, torch.Tensor]] = {}
    trained: dict[OperatorId, dict[str, dict[str, Any]]] = {}
    for index, chunk in enumerate(unwrap_model(list(chunks))):
        for name, tensor, operator in operator_of_parameters(chunk):
            compute.setdefault(operator, {})[f"chunk{index}.{name}"] = tensor
            kept = trained.setdefault(operator, {})
            if not isinstance(tensor, torch.nn.Parameter):
                continue
            state = states.get(id(optimizer.master_of(tensor)))
            if state is not None:
                kept[f"chunk{index}.{name}"] = state
            elif not any(access.shares(tensor) for access in optimizer.masters):
                raise AssertionError(f"no optimizer steps {name}")
    found = sum(map(len, trained.values()))
    if found != len(states):
        raise AssertionError(f"operators own {found} parameters of the optimizer's {len(states)}")
    return [OperatorState(op, compute[op], trained[op]) for op in sorted(compute)]
