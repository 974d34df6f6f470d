"""Master weights: where the optimizers keep them, and the copies between them and the model.

The seams that upstream has for this are private methods of its optimizers; they are used here only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_COPIED_GROUPS = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
)
"""The lists that upstream goes through, in pairs, when it casts master weights to compute weights:
those of `Float16OptimizerWithFloat16Params` and those of `DistributedOptimizer`."""


def master_of(parts: Sequence[MegatronOptimizer], parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that is optimized for a parameter of the model.

    That is its FP32 copy, with the distributed optimizer this rank's shard (None: it has none of
    this parameter), or in FP32 the parameter itself.
    """
    for part in parts:
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            place = part.model_param_group_index_map.get(parameter)
            if place is not None:
                group, order = place
                shard: torch.Tensor = part.optimizer.param_groups[group]["params"][order]
                return shard
    return getattr(parameter, "main_param", parameter)


def is_sharded(parts: Sequence[MegatronOptimizer], parameter: torch.Tensor) -> bool:
    """Returns whether the replicas share the optimizer's state of a parameter of the model.

    A rank may then have none of it.
    """
    return any(
        isinstance(part, DistributedOptimizer)
        and not part.is_stub_optimizer
        and any(parameter in buffer.param_index_map for buffer in part.buffers)
        for part in parts
    )


def is_state_whole(parts: Sequence[MegatronOptimizer]) -> bool:
    """Returns whether this rank has all of the state of what it trains, and no shard of it."""
    return not any(isinstance(part, DistributedOptimizer) for part in parts)


def prepare_alone(part: MegatronOptimizer, *, overflowed: bool) -> bool:
    """Does what `prepare_grads` does, without its collective.

    Args:
        part: one of the chained optimizers.
        overflowed: what the collective would have found; the loss scaler learns it.

    Returns:
        Whether this rank's own gradients overflowed.
    """
    scaler = getattr(part, "grad_scaler", None)
    if scaler is None:
        part.prepare_grads()
        return False
    found = torch.zeros_like(part.found_inf)
    if not part.is_stub_optimizer:
        part._copy_model_grads_to_main_grads()  # noqa: SLF001
        gradients = part._collect_main_grad_data_for_unscaling()  # noqa: SLF001
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scaler.inv_scale)
    scaler.update(overflowed)
    return bool(found.item())


def has_gradient(part: MegatronOptimizer) -> bool:
    """Returns whether a step of this optimizer has anything to do."""
    return not part.is_stub_optimizer and any(
        master.grad is not None or getattr(master, "decoupled_grad", None) is not None
        for master in part.get_parameters()
    )


def drop_gradient(master: torch.Tensor) -> None:
    """Makes the optimizer pass over a master weight: with zeros it would move it."""
    master.grad = None
    if hasattr(master, "decoupled_grad"):  # TransformerEngine's precision-aware optimizer
        master.decoupled_grad = None


@contextlib.contextmanager
def casting_all_but(part: MegatronOptimizer, frozen: Iterable[torch.Tensor]) -> Iterator[None]:
    """Lets the step write the compute weights of all parameters of the model but these.

    Upstream casts all master weights, also of parameters that had no gradient.
    """
    left_out = {id(parameter) for parameter in frozen}
    kept: dict[str, Any] = {}
    for model_name, master_name in _COPIED_GROUPS:
        if left_out and hasattr(part, model_name):
            kept |= {name: getattr(part, name) for name in (model_name, master_name)}
            pairs = [
                [pair for pair in zip(*groups, strict=True) if id(pair[0]) not in left_out]
                for groups in zip(kept[model_name], kept[master_name], strict=True)
            ]
            setattr(part, model_name, [[model for model, _ in group] for group in pairs])
            setattr(part, master_name, [[master for _, master in group] for group in pairs])
    try:
        yield
    finally:
        for name, groups in kept.items():
            setattr(part, name, groups)
