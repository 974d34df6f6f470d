# SPDX-License-Identifier: Apache-2.0
"""Frozen execution: operators that run forward and input gradient and are not trained.

During a replay only the operators whose FULL state is loaded are trained. For the others there is
no weight-gradient GEMM, no gradient reduction of their own and no optimizer. Nothing else changes a
bit: what is sent over the stage's boundaries, the gradients and the new state of the operators that
are trained are those of a step in which all are trained.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_moevement.integrations.megatron.inventory import operator_of_parameters
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.policy.job.graph_start import NO_LAYER, decided, vote
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.runtime.interrupts.host_wait import await_on_host

_NUMBERED = re.compile(r"(weight|bias)\d+")
"""How TransformerEngine's grouped linear names the parameters of its experts."""


class FrozenWork(Enum):
    """What becomes of the weight gradients of frozen operators."""

    SKIPPED = "skipped"
    """They are not computed."""

    DROPPED = "dropped"
    """They are computed and reduced as in training, and dropped: to measure what skipping saves."""


class Freezing:
    """Which operators of this rank are trained; all ranks of a stage change it at the same step."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: SplitOptimizer,
        work: FrozenWork = FrozenWork.SKIPPED,
    ) -> None:
        """Finds the parameters of the operators; all are trained.

        Args:
            work: what becomes of weight gradients of frozen operators, the same on all ranks.
        """
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self.work = work
        self._config: Any = self._chunks[0].config
        self._parameters: dict[OperatorId, list[torch.nn.Parameter]] = {}
        self._together: list[list[torch.nn.Parameter]] = []
        chunks = unwrap_model(self._chunks)
        self._model: Any = chunks[0]
        self._first_chunks: list[Any] = [chunk for chunk in chunks if chunk.pre_process]
        for chunk in chunks:
            for _, tensor, operator in operator_of_parameters(chunk):
                own = self._parameters.setdefault(operator, [])
                if isinstance(tensor, torch.nn.Parameter):
                    own.append(tensor)
            self._together += frozen_together(chunk)
        self._frozen: frozenset[OperatorId] = frozenset()
        self._replays = False
        self._replaying = contextlib.ExitStack()
        self._graph = contextlib.ExitStack()

    @property
    def frozen(self) -> frozenset[OperatorId]:
        """This rank's operators that are not trained."""
        return self._frozen

    @property
    def operators(self) -> frozenset[OperatorId]:
        """All operators of this rank."""
        return frozenset(self._parameters)

    def set_active(self, active: frozenset[OperatorId]) -> None:
        """Trains these operators from the next step on and no others; with all, training as usual.

        Between two steps only, and on all ranks of the stage: it makes collectives within it. Tied
        operators must be given together.

        Args:
            active: operators to train; those that lie on other ranks are passed over.
        """
        frozen = self.operators - active
        self._frozen = frozen
        left_alone = [one for operator in sorted(frozen) for one in self._parameters[operator]]
        self._optimizer.freeze(left_alone)
        if self.work is FrozenWork.SKIPPED:
            self._skip_gradients()

    def _skip_gradients(self) -> None:
        """Lets backward and reductions leave out what is frozen now."""
        frozen = self._frozen
        self._graph.close()
        for operator, parameters in self._parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(operator not in frozen)
        for group in self._together:
            trained = any(parameter.requires_grad for parameter in group)
            for parameter in group:
                parameter.requires_grad_(trained)
        anywhere, start = self._agree_within_stage()
        if anywhere:
            self._graph.enter_context(self._graph_from(start))
        # A rank without anything frozen must reduce and gather in the order of those that have.
        if anywhere and not self._replays:
            self._replaying.enter_context(_no_overlap(self._chunks))
            self._replaying.enter_context(self._own_finalization())
        if self._replays and not anywhere:
            self._replaying.close()
        self._replays = anywhere

    def close(self) -> None:
        """Ends a replay that was interrupted: nothing of it may be put back at a later time.

        Without this the hooks would be put back when garbage is collected, into another replay.
        """
        self._graph.close()
        self._replaying.close()
        self._replays = False

    def _agree_within_stage(self) -> tuple[bool, int]:
        """Returns whether a rank of the stage has frozen operators, and where graphs begin.

        Both decide in which collectives of the passes a rank takes part, so they are the same on
        all ranks of the stage: a collective within it.
        """
        own = vote(self._frozen, self.operators - self._frozen)
        device = next(self._chunks[0].parameters()).device
        least = torch.tensor(own, dtype=torch.int64, device=device)
        group = self._model.pg_collection.tp_dp_cp
        await_on_host(dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group, async_op=True))
        return decided(least.tolist())

    @contextlib.contextmanager
    def _own_finalization(self) -> Iterator[None]:
        """Reduces gradients in the order and the shapes of ordinary training."""
        upstream = self._config.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> None:
            with self._trained_buckets_only(), self._as_if_trained():
                upstream(*args, **kwargs)

        self._config.finalize_model_grads_func = finalize
        try:
            yield
        finally:
            self._config.finalize_model_grads_func = upstream

    @contextlib.contextmanager
    def _trained_buckets_only(self) -> Iterator[None]:
        """Hides the buckets all of whose gradients are zeros, or will be discarded."""
        left_alone = {
            id(parameter) for operator in self._frozen for parameter in self._parameters[operator]
        }
        with contextlib.ExitStack() as stack:
            for chunk in self._chunks:
                for name in ("bucket_groups", "expert_parallel_bucket_groups"):
                    groups = getattr(chunk, name)
                    stack.callback(setattr, chunk, name, groups)
                    trained = [
                        group
                        for group in groups
                        if any(id(parameter) not in left_alone for parameter in group.params)
                    ]
                    setattr(chunk, name, trained)
            yield

    @contextlib.contextmanager
    def _as_if_trained(self) -> Iterator[None]:
        """Makes all parameters look trained: frozen ones have a gradient of zeros.

        With sequence parallelism upstream flattens the gradients of norms and gates that want one
        into one tensor. A shorter tensor would be added up in another order.
        """
        without = [
            parameter
            for parameters in self._parameters.values()
            for parameter in parameters
            if not parameter.requires_grad
        ]
        for parameter in without:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in without:
                parameter.requires_grad_(False)

    @contextlib.contextmanager
    def _graph_from(self, start: int) -> Iterator[None]:
        """Begins the graph of a stage whose input wants no gradient at a layer's input.

        A recomputed block whose input wants no gradient has none for its parameters either, and
        it may begin before that layer: so the graph begins at the embedding's output.

        Args:
            start: the layer, the same on all ranks of the stage.
        """
        hooks = []
        if start != NO_LAYER:
            for chunk in self._first_chunks:
                if self._config.recompute_granularity is not None:
                    hooks.append(chunk.embedding.register_forward_hook(_want_gradient))
                    continue
                for layer in chunk.decoder.layers:
                    if layer.layer_number - 1 == start:
                        hook = _want_gradient_of_input
                        hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for each in hooks:
                each.remove()


def frozen_together(chunk: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters that can only be frozen all at once.

    TransformerEngine's grouped linear decides by its first expert for all of them. So a mixture is
    computed as a whole, and the gradients of frozen experts are discarded.
    """
    groups = []
    for module in chunk.modules():
        own: Mapping[str, torch.nn.Parameter] = dict(module.named_parameters(recurse=False))
        numbered = [one for name, one in own.items() if _NUMBERED.fullmatch(name)]
        if numbered:
            groups.append(numbered)
    return groups


@contextlib.contextmanager
def _no_overlap(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Reduces and gathers without overlap, and afterwards overlaps again as in a first step.

    A frozen parameter never reports its gradient, and the hooks of overlapped gathers refuse it.
    The buckets, and so the bits, are the same. Processes that joined later never had a first step:
    with all in the same state, ranks start their collectives in the same order.
    """
    config = chunks[0].ddp_config
    overlap = {
        name: getattr(config, name) for name in ("overlap_grad_reduce", "overlap_param_gather")
    }
    gathers = [chunk for chunk in chunks if chunk.remove_forward_pre_hook_handles]
    for chunk in gathers:
        chunk.disable_forward_pre_hook()  # which gathers what is still missing
    for name in overlap:
        setattr(config, name, False)
    try:
        yield
    finally:
        for name, value in overlap.items():
            setattr(config, name, value)
        for chunk in gathers:
            chunk.enable_forward_pre_hook()
        if any(overlap.values()):
            for chunk in chunks:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    expect_first_step(group)
                    group.param_gather_dispatched = False  # the next forward pass gathers


def expect_first_step(group: Any) -> None:
    """Lets a group of buckets learn the order of its gradients anew."""
    group.is_first_batch = True
    group.golden_per_param_grad_ready_counts = {}
    group.per_param_grad_ready_counts = {}


def forget_wanted_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Removes the hooks that an interrupted replay left in the model."""
    for chunk in unwrap_model(list(chunks)):
        for module in chunk.modules():
            for hooks, own in (
                (module._forward_hooks, _want_gradient),  # noqa: SLF001  (the handles are lost)
                (module._forward_pre_hooks, _want_gradient_of_input),  # noqa: SLF001
            ):
                for key in [key for key, hook in hooks.items() if hook is own]:
                    del hooks[key]


def _want_gradient(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    del module, args
    return output if output.requires_grad else output.requires_grad_()


def _want_gradient_of_input(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Hooks a transformer layer, which upstream calls with `hidden_states` by name."""
    hidden_states = _want_gradient(module, args, kwargs["hidden_states"])
    return args, {**kwargs, "hidden_states": hidden_states}
