# SPDX-License-Identifier: Apache-2.0
"""Mutations of a recovery: what a rank does wrongly so that a test of bits must fail.

A mutation replaces functions of the program by name, in the process of a rank, before it trains.
Nothing in the program knows of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_moevement.integrations.megatron import optimizer
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics, SplitOptimizer
from megatron_moevement.integrations.megatron.random_state import TRACKER, random_state
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.policy.job.state_recipe import Content, Timing
from megatron_moevement.policy.window import skipping_schedule
from megatron_moevement.policy.window.window_planner import WindowPlan
from megatron_moevement.runtime.capture.capture import Capture, HostCopies
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies import live_objects
from megatron_moevement.strategies.moevement.recovery.replay import Replay
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing
from megatron_moevement.strategies.strategy import Covered
from megatron_moevement.training import job

_EXPERT_STREAM = "expert-parallel-rng"


def do_nothing() -> None:
    """Replaces nothing: what is left must be green."""


def skip_first_step() -> None:
    """Leaves weights and moments as they are in the first step of a replay, and counts it."""
    statistics, commit = Replay.statistics, SplitOptimizer.commit
    skipped: list[GradientStatistics] = []

    def note(self: Replay, step: int) -> GradientStatistics | None:
        found = statistics(self, step)
        if found is not None and step == self.start.committed + 1:
            skipped.append(found)
        return found

    def skip(self: SplitOptimizer, given: GradientStatistics, *args: Any) -> bool:
        if given in skipped:
            for part in () if given.overflow else self.parts:
                _count_only(part.optimizer)
        return commit(self, given, *args)

    _replace(Replay, "statistics", note)
    _replace(SplitOptimizer, "commit", skip)


def _count_only(adam: torch.optim.Optimizer) -> None:
    """Makes the next step of an Adam count for every weight that has a gradient, and no more."""

    def count() -> None:
        for group in adam.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    adam.state[weight]["step"] += 1
        del vars(adam)["step"]

    vars(adam)["step"] = count


def shift_ledger() -> None:
    """Takes the ledger's entry of the step after."""

    def shifted(self: Replay, step: int) -> GradientStatistics | None:
        if self._slots is None or step > self._slots.window.last:
            return None
        entry = self.agreed(step + 1)
        return GradientStatistics(found_inf=entry.found_inf, norm=entry.grad_norm)

    _replace(Replay, "statistics", shifted)


def drop_adam_step() -> None:
    """Leaves Adam's step counters as they are in a new process."""
    _replace(LiveOperators, "set_step", lambda self, operators, step: None)
    _replace(SplitOptimizer, "set_group_steps", lambda self, step: None)


def forget_expert_bias() -> None:
    """Puts no `expert_bias` back."""

    @torch.no_grad()
    def put_back(self: LiveOperators, operator: Any, content: Any, host: Any) -> None:
        for piece, tensor in zip(self.pieces(operator, content), host, strict=True):
            if piece.timing is not Timing.AT_ONCE:
                piece.elements.copy_(tensor)

    _replace(LiveOperators, "put_back", put_back)


def forget_second_scaler() -> None:
    """Puts the loss scaler of the dense optimizer back, not that of the experts' optimizer."""
    load = SplitOptimizer.load_scalers

    def load_first(self: SplitOptimizer, states: Sequence[Any]) -> None:
        load(self, [states[0], *self.scalers()[1:]])

    _replace(SplitOptimizer, "load_scalers", load_first)


def capture_gathered_parameters() -> None:
    """Captures COMPUTE as a replica's gathered parameters hold it before they are gathered.

    That is what the shard was before the commit: with an overlapped gather the other replicas
    learn the new one in the next forward pass.
    """
    await_commit, begin = SparseCheckpointing.await_commit, Capture.begin
    before: dict[int, torch.Tensor] = {}

    def remember(self: SparseCheckpointing, step: int) -> Covered:
        live = self._session.live
        for operator in live.operators:
            for piece in live.pieces(operator.id, Content.COMPUTE):
                before[piece.live.data_ptr()] = piece.elements.clone()
        return await_commit(self, step)

    def begin_stale(self: Capture, copies: Any, landed: Callable[[], None], **rest: Any) -> None:
        begin(self, [_stale(batch, before) for batch in copies], landed, **rest)

    _replace(SparseCheckpointing, "await_commit", remember)
    _replace(Capture, "begin", begin_stale)


def _stale(copies: HostCopies, before: dict[int, torch.Tensor]) -> HostCopies:
    """Returns copies of what was there before; what is captured in its own type is FULL."""
    sources = [
        source if source.dtype is target.dtype else before.get(source.data_ptr(), source)
        for source, target in zip(copies.sources, copies.targets, strict=True)
    ]
    return dataclasses.replace(copies, sources=sources)


def step_frozen_operators() -> None:
    """Lets the optimizer step frozen operators, with gradients of zeros."""

    def zeros(master: torch.Tensor) -> None:
        master.grad = torch.zeros_like(master)

    _replace(optimizer, "drop_gradient", zeros)


def differ_between_replicas() -> None:
    """Gives two experts of a layer each other's slot, on one replica."""
    plan_window = vars(skipping_schedule)["plan_window"]

    def swapped(*args: Any, **kwargs: Any) -> WindowPlan:
        plan: WindowPlan = plan_window(*args, **kwargs)
        if Launch.from_environment().rank != 1:
            return plan
        slots = dict(plan.schedule.slots)
        experts = sorted(one for one in slots if one.kind is OperatorKind.EXPERT)
        one = experts[0]
        other = next(each for each in experts if slots[each] != slots[one])
        slots[one], slots[other] = slots[other], slots[one]
        return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, slots=slots))

    _replace(skipping_schedule, "plan_window", swapped)


def forget_expert_stream() -> None:
    """Leaves the experts' random stream as it is in a new process."""
    restore = vars(live_objects)["restore_random_state"]

    def restore_others(state: dict[str, Any]) -> None:
        stream = random_state()[TRACKER][_EXPERT_STREAM]
        restore({**state, TRACKER: {**state[TRACKER], _EXPERT_STREAM: stream}})

    _replace(live_objects, "restore_random_state", restore_others)


def choose_experts_at_random() -> None:
    """Makes routers choose by random numbers, from the experts' stream: no flag of ours does."""
    configure = vars(job)["transformer_config"]

    @functools.wraps(configure)
    def configured(*args: Any, **kwargs: Any) -> Any:
        config = configure(*args, **kwargs)
        config.moe_router_force_load_balancing = True
        return config

    _replace(job, "transformer_config", configured)


MUTATIONS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        do_nothing,
        skip_first_step,
        shift_ledger,
        drop_adam_step,
        forget_expert_bias,
        forget_second_scaler,
        capture_gathered_parameters,
        step_frozen_operators,
        differ_between_replicas,
        forget_expert_stream,
        choose_experts_at_random,
    )
}
"""By name."""


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: a mutation of nothing shows nothing"
    setattr(owner, name, function)
