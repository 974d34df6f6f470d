# SPDX-License-Identifier: Apache-2.0
"""Master weights: where the optimizers keep them, and the copies between them and the model.

The seams that upstream has for this are private methods of its optimizers; they are used here only.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer


class MasterAccess(ABC):
    """The master weights of one of the chained optimizers; a stub has none.

    The tensors stay the same: every step changes them in place.
    """

    is_sharded = False
    """Whether replicas share them, so that a rank may have none of a parameter."""

    def __init__(self, part: MegatronOptimizer) -> None:
        self.part = part

    @abstractmethod
    def master_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns what is optimized for a parameter of the model; None: no tensor of this rank."""

    def shares(self, parameter: torch.Tensor) -> bool:
        """Returns whether the replicas share what is kept of a parameter of the model."""
        return False

    @abstractmethod
    def cast(self) -> None:
        """Derives the compute weights that this rank's masters are those of; no collective."""

    @abstractmethod
    def step(self, frozen: Iterable[torch.Tensor]) -> None:
        """Applies the prepared gradients and casts all masters but those of frozen parameters."""


class _OwnMasters(MasterAccess):
    """Those of `FP32Optimizer`: the parameters of the model themselves."""

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter

    def cast(self) -> None:
        pass

    def step(self, frozen: Iterable[torch.Tensor]) -> None:
        self.part.step_with_ready_grads()


class _CopiedMasters(MasterAccess):
    """Those of `Float16OptimizerWithFloat16Params`: a copy of each parameter."""

    _groups = ("float16_groups", "fp32_from_float16_groups")
    """Where upstream keeps parameters of the model, and the master weights cast to them."""

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return getattr(parameter, "main_param", parameter)

    def cast(self) -> None:
        if not self.part.is_stub_optimizer:
            self.part._copy_main_params_to_model_params()  # noqa: SLF001  (no public way to it)

    def step(self, frozen: Iterable[torch.Tensor]) -> None:
        with self._casting_all_but(frozen):
            # Not the distributed optimizer's own: it gathers, which is due after the commit.
            MixedPrecisionOptimizer.step_with_ready_grads(self.part)

    @contextlib.contextmanager
    def _casting_all_but(self, frozen: Iterable[torch.Tensor]) -> Iterator[None]:
        """Lets upstream cast fewer masters: it does not look at their gradients."""
        left_out = {id(parameter) for parameter in frozen}
        if not left_out or self.part.is_stub_optimizer:
            yield
            return
        kept = {name: getattr(self.part, name) for name in self._groups}
        pairs = [
            [pair for pair in zip(*groups, strict=True) if id(pair[0]) not in left_out]
            for groups in zip(*kept.values(), strict=True)
        ]
        for place, name in enumerate(kept):
            setattr(self.part, name, [[pair[place] for pair in group] for group in pairs])
        try:
            yield
        finally:
            for name, groups in kept.items():
                setattr(self.part, name, groups)


class _ShardedMasters(_CopiedMasters):
    """Those of `DistributedOptimizer`: this rank's shards of copies, or in FP32 of the model."""

    is_sharded = True
    _groups = ("model_float16_groups", "shard_fp32_from_float16_groups")

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if not self.shares(parameter) or parameter not in self.part.model_param_group_index_map:
            return None
        group, order = self.part.model_param_group_index_map[parameter]
        shard: torch.Tensor = self.part.param_groups[group]["params"][order]
        return shard

    def shares(self, parameter: torch.Tensor) -> bool:
        buffers = [] if self.part.is_stub_optimizer else self.part.buffers
        return any(parameter in buffer.param_index_map for buffer in buffers)


def access_of(part: MegatronOptimizer) -> MasterAccess:
    """Returns the access that fits one of the chained optimizers."""
    if isinstance(part, DistributedOptimizer):
        return _ShardedMasters(part)
    return (_CopiedMasters if isinstance(part, MixedPrecisionOptimizer) else _OwnMasters)(part)


def prepare_alone(part: MegatronOptimizer, *, overflowed: bool) -> bool:
    """Does what `prepare_grads` does, without its collective.

    Args:
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
    return any(
        master.grad is not None or getattr(master, "decoupled_grad", None) is not None
        for master in part.get_parameters()
    )


def drop_gradient(master: torch.Tensor) -> None:
    """Makes the optimizer pass over a master weight: with zeros it would move it."""
    master.grad = None
    if hasattr(master, "decoupled_grad"):  # TransformerEngine's precision-aware optimizer
        master.decoupled_grad = None
