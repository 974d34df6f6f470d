"""Which weight, master weight, moment, counter and buffer of a rank belongs to which operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from megatron_moevement.integrations.megatron.masters import is_sharded, master_of
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
    optimizer: Mapping[str, torch.Tensor | float]
    """Master weights, moments and steps: with the distributed optimizer, this rank's shard."""


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


class _OptimizerStates:
    """Finds the optimizer's state of a parameter among the chained optimizers."""

    def __init__(self, optimizer: SplitOptimizer) -> None:
        self._parts = [part for part in optimizer.parts if not part.is_stub_optimizer]
        self._groups = {
            id(parameter): (part, group)
            for part in self._parts
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        }

    def of(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor | float]:
        """Returns master weight, moments and step of a parameter; empty without a shard of it.

        Raises:
            AssertionError: no optimizer steps the parameter.
        """
        master = master_of(self._parts, parameter)
        if master is None or id(master) not in self._groups:
            if not is_sharded(self._parts, parameter):
                raise AssertionError(f"no optimizer steps {name}")
            return {}
        part, group = self._groups[id(master)]
        state: dict[str, Any] = {"master": master, **part.optimizer.state[master]}
        if "step" not in state and "step" in group:  # apex and TransformerEngine count per group
            state["step"] = group["step"]
        return state


def operator_states(
    chunks: Sequence[torch.nn.Module], optimizer: SplitOptimizer
) -> list[OperatorState]:
    """Returns the state of every operator of this rank, in the order of their names.

    Every parameter of the optimizer must belong to exactly one operator.

    Raises:
        AssertionError: the optimizer holds a parameter that no operator has, or the model one that
            no optimizer has.
    """
    states = _OptimizerStates(optimizer)
    compute: dict[OperatorId, dict[str, torch.Tensor]] = {}
    trained: dict[OperatorId, dict[str, torch.Tensor | float]] = {}
    found = 0
    for index, chunk in enumerate(unwrap_model(list(chunks))):
        for name, tensor, operator in operator_of_parameters(chunk):
            full_name = f"chunk{index}.{name}"
            compute.setdefault(operator, {})[full_name] = tensor
            state = states.of(name, tensor) if isinstance(tensor, torch.nn.Parameter) else {}
            found += bool(state)
            trained.setdefault(operator, {}).update(
                (f"{full_name}.{key}", value) for key, value in state.items()
            )
    held = sum(_num_parameters(part) for part in optimizer.parts)
    if found != held:
        raise AssertionError(f"operators own {found} parameters of the optimizer's {held}")
    return [OperatorState(op, compute[op], trained[op]) for op in sorted(compute)]


def _num_parameters(part: MegatronOptimizer) -> int:
    if part.is_stub_optimizer:
        return 0
    return sum(len(group["params"]) for group in part.optimizer.param_groups)
