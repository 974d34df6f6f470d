# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer, split into what needs other ranks and what changes state.

Upstream's `ChainedOptimizer.step` (megatron/core/optimizer/optimizer.py) mixes the two: it updates
the loss scaler before the gradient norm is known, and the distributed optimizer gathers parameters
inside of the step. Here a step is `prepare` (collectives, no state), `commit` (state, no
collectives) and `gather` (collectives, no state), so that no rank can change its state before all
ranks can.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.megatron.empty_parts import mend_empty_parts
from megatron_moevement.integrations.megatron.masters import (
    MasterAccess,
    access_of,
    drop_gradient,
    has_gradient,
    prepare_alone,
)
from megatron_moevement.integrations.megatron.optimizer_totals import count_zeros, parameters_norm
from megatron_moevement.integrations.megatron.transformer_config import same_names, torch_dtype
from megatron_moevement.policy.job.state_recipe import RECIPES, StateRecipe
from megatron_moevement.runtime.faults.fault_points import Strike, pass_by
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.settings.optimization import Optimization
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision


class CommittedGradScaler(DynamicGradScaler):  # type: ignore[misc]  # upstream is not typed
    """A dynamic loss scaler that notes an overflow at once and acts on it at the commit."""

    def __init__(self, scaler: DynamicGradScaler) -> None:
        super().__init__(
            initial_scale=scaler.scale.item(),
            min_scale=scaler.min_scale.item(),
            growth_factor=scaler.growth_factor.item(),
            backoff_factor=scaler.backoff_factor.item(),
            growth_interval=scaler.growth_interval,
            hysteresis=scaler.hysteresis,
        )
        self._noted: bool | None = None

    def update(self, found_inf: bool) -> None:
        """Notes whether this step overflowed; upstream calls it while gradients are prepared."""
        self._noted = found_inf

    def commit(self) -> None:
        """Moves the scale and the trackers by what was noted."""
        if self._noted is not None:
            super().update(self._noted)
            self._noted = None

    def discard(self) -> None:
        """Forgets what was noted: the step is not committed."""
        self._noted = None


@dataclasses.dataclass(frozen=True)
class GradientStatistics:
    """What all ranks know about the gradients of a step before they apply them."""

    found_inf: tuple[bool, ...]
    """For each chained optimizer (dense, experts), whether its gradients overflowed."""
    norm: float | None
    """The global gradient norm; None when a gradient overflowed."""

    @property
    def overflow(self) -> bool:
        """Whether the step is skipped."""
        return any(self.found_inf)


class UnequalStepsError(MoEvementError, RuntimeError):
    """Adam counts different steps for parameters that were all trained as often."""


class UnlikeLedgerError(MoEvementError, RuntimeError):
    """A replayed step differs from the step that the ledger tells of."""


class SplitOptimizer:
    """The optimizer of one rank; every rank of the job calls each method in the same step."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        chunks: Sequence[DistributedDataParallel],
        recipe: StateRecipe,
    ) -> None:
        self.megatron = optimizer
        self.recipe = recipe
        self._step = recipe.counter
        self.parts: tuple[MegatronOptimizer, ...] = (
            tuple(optimizer.chained_optimizers)
            if isinstance(optimizer, ChainedOptimizer)
            else (optimizer,)
        )
        mend_empty_parts(self.parts)
        self.masters = tuple(map(access_of, self.parts))
        self._chunks = chunks
        self._device = next(chunks[0].parameters()).device
        self._frozen: tuple[torch.Tensor, ...] = ()
        for part in self.parts:
            scaler = getattr(part, "grad_scaler", None)
            if isinstance(scaler, DynamicGradScaler):
                part.grad_scaler = CommittedGradScaler(scaler)
        self.complete_state()

    def complete_state(self) -> None:
        """Creates what is missing of moments and step counters.

        Optimizers create them in their first step; before that, and in a checkpoint that was taken
        while every step overflowed, a reader would not find them.
        """
        for part in self.parts:
            counts_each = isinstance(part.optimizer, torch.optim.Adam)
            for group in part.param_groups:
                if not counts_each:  # apex and TransformerEngine count per group
                    group.setdefault(self._step, 0)
                for master in group["params"]:
                    state = part.optimizer.state[master]
                    if counts_each:
                        state.setdefault(self._step, torch.tensor(0.0))
                    for moment in self.recipe.moments:
                        if moment.key not in state:
                            dtype = torch_dtype(moment.held_as)
                            state[moment.key] = torch.zeros_like(master, dtype=dtype)

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns what is optimized for a parameter of the model; None: no tensor of this rank."""
        found = (access.master_of(parameter) for access in self.masters)
        return next((master for master in found if master is not None), None)

    @property
    def is_state_whole(self) -> bool:
        """Whether this rank has all of the state of what it trains, and no shard of it."""
        return not any(access.is_sharded for access in self.masters)

    def freeze(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leaves these parameters of the model alone from now on, and no others.

        A step then changes neither their master weights, moments and step counters nor their
        compute weights. apex and TransformerEngine count steps per group, not per parameter: that
        count goes on.
        """
        self._frozen = tuple(parameters)

    def prepare(self, statistics: GradientStatistics | None = None) -> GradientStatistics:
        """Makes the reduced gradients ready and returns their statistics; changes no state.

        Must run once for each set of gradients: it unscales in place.

        Args:
            statistics: what the ledger says of this step when it is replayed. Then no collective is
                made. None: they are computed, by model-parallel collectives.

        Raises:
            UnlikeLedgerError: this rank's gradients overflow in a step that did not overflow.
            ValueError: a parameter is frozen and no statistics are given: a norm that lacks its
                gradient is not the step's.
        """
        if statistics is None:
            if self._frozen:
                raise ValueError(
                    f"{len(self._frozen)} parameters are frozen: the gradients' statistics have to "
                    "come from the ledger"
                )
            found_inf = tuple(part.prepare_grads() for part in self.parts)
            norm = None if any(found_inf) else self.megatron.get_grad_norm()
            return GradientStatistics(found_inf=found_inf, norm=norm)
        for index, (part, overflowed) in enumerate(
            zip(self.parts, statistics.found_inf, strict=True)
        ):
            if prepare_alone(part, overflowed=overflowed) and not overflowed:
                raise UnlikeLedgerError(
                    f"optimizer {index}: a replayed gradient overflows, that of the step did not"
                )
        for parameter in self._frozen:
            master = self.master_of(parameter)
            if master is not None:
                drop_gradient(master)
        return statistics

    def count_zeros(self, statistics: GradientStatistics) -> int | None:
        """Returns how many elements of the gradients are zero, by collectives.

        Args:
            statistics: what `prepare` returned, where it made collectives itself.

        Returns:
            None where a gradient overflowed: they are not applied.
        """
        return None if statistics.overflow else count_zeros(self.parts, self._device)

    def parameters_norm(self) -> float:
        """Returns the L2 norm of all master weights, by collectives."""
        return parameters_norm(self.parts, self._device)

    def clip_factor(self, statistics: GradientStatistics) -> float:
        """Returns the factor that clipping applies to all gradients, 1 when it applies none."""
        limit = float(self.megatron.config.clip_grad)
        if statistics.norm is None or limit <= 0.0:
            return 1.0
        return min(1.0, limit / (statistics.norm + 1e-6))

    def commit(self, statistics: GradientStatistics, strike: Strike = pass_by) -> bool:
        """Clips and applies the gradients and moves the loss scalers; without collectives.

        Returns:
            Whether the step was applied; an overflow skips it.
        """
        if not statistics.overflow:
            for access in self.masters:
                self._clip(access.part, statistics)
                self._apply(access)
                strike(FaultPoint.OPTIMIZERS)
        for part in self.parts:
            scaler = getattr(part, "grad_scaler", None)
            if isinstance(scaler, CommittedGradScaler):
                scaler.commit()
        return not statistics.overflow

    def gather(self) -> None:
        """Gathers the parameters that the distributed optimizer updated in shards.

        With `--overlap-param-gather` the next forward pass does it instead.
        """
        for chunk in self._chunks:
            config = chunk.ddp_config
            if config.use_distributed_optimizer and not config.overlap_param_gather:
                chunk.start_param_sync()

    def complete_parameters(self) -> None:
        """Gathers what an overlapped gather has not brought yet; every rank calls it.

        With `--overlap-param-gather` the compute weights of other ranks' shards are old until the
        next forward pass needs them. Whoever reads them before must call this.
        """
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def adam_step(self) -> int:
        """Returns the steps that were applied, by the count of each parameter.

        Raises:
            UnequalStepsError: parameters count different steps, as in the middle of a replay.
        """
        steps = set(self._step_counters())
        if len(steps) > 1:
            raise UnequalStepsError(f"parameters count different steps: {sorted(steps)}")
        return steps.pop() if steps else 0

    def first_adam_step(self) -> int:
        """Returns the steps that were applied, by the count of the first parameter alone.

        Cheap, and the same as `adam_step` wherever that raises nothing.
        """
        return next(self._step_counters(), 0)

    def _step_counters(self) -> Iterator[int]:
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    yield int(state.get(self._step, group.get(self._step, 0)))

    def set_adam_step(self, step: int) -> None:
        """Sets the steps that were applied, for all parameters."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    if self._step in state:
                        state[self._step] = torch.full_like(state[self._step], step)
                    else:  # apex and TransformerEngine count per group
                        group[self._step] = step

    def set_group_steps(self, step: int) -> None:
        """Sets the steps that were applied where they are counted per group of parameters.

        That is how apex and TransformerEngine count; torch counts per parameter.
        """
        for part in self.parts:
            for group in part.param_groups:
                if self._step in group:
                    group[self._step] = step

    def loss_scale(self) -> float:
        """Returns the scale that the next loss is multiplied with."""
        return float(self.megatron.get_loss_scale().item())

    def scalers(self) -> tuple[dict[str, Any] | None, ...]:
        """Returns the state of each part's loss scaler, None where there is none."""
        return tuple(
            _plain(scaler.state_dict()) if (scaler := getattr(part, "grad_scaler", None)) else None
            for part in self.parts
        )

    def load_scalers(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Puts back what `scalers` returned.

        Another layout may have fewer parts or more: a part without a state of its own takes that of
        the dense part, which comes first.
        """
        own = [*states, *[states[0]] * len(self.parts)] if states else []
        for part, state in zip(self.parts, own, strict=False):
            if state is not None:
                scale = torch.tensor([state["scale"]], dtype=torch.float)
                part.grad_scaler.load_state_dict(
                    {**state, "scale": scale} if "scale" in state else dict(state)
                )

    def _clip(self, part: MegatronOptimizer, statistics: GradientStatistics) -> None:
        if has_gradient(part) and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                part.get_parameters(),
                max_norm=part.config.clip_grad,
                total_norm=statistics.norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )

    def _apply(self, access: MasterAccess) -> None:
        part = access.part
        if self._frozen and not part.is_stub_optimizer and not has_gradient(part):
            part.optimizer.step()  # which may count steps per group; there is nothing to cast
        else:
            access.step(self._frozen)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def build_optimizer(
    optimization: Optimization,
    parallelism: Parallelism,
    precision: Precision,
    chunks: Sequence[DistributedDataParallel],
) -> SplitOptimizer:
    """Builds the optimizers of the dense part and of the experts, and their state.

    The moments exist from the start, so that every later reader finds them.
    """
    config = OptimizerConfig(
        **same_names(OptimizerConfig, optimization, parallelism, precision),
        params_dtype=torch_dtype(precision.compute_type),
    )
    megatron = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    return SplitOptimizer(megatron, chunks, RECIPES[precision.compute_type])


def is_finite(statistics: GradientStatistics) -> bool:
    """Returns whether the step can be committed; an overflow is skipped, so it can."""
    return statistics.norm is None or math.isfinite(statistics.norm)
