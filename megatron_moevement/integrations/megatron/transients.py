# SPDX-License-Identifier: Apache-2.0
"""Transients: what an interrupted step leaves behind that the next one must not find.

A survivor keeps weights, masters, moments, step counters, loss scalers and schedules. Everything in
between is put back here to what it is between two steps: gradients, what the buckets know of their
communication, what routers count within a step and what is counted of them, what was noted for the
commit, the functions that a schedule takes away while it runs, the flags that upstream's code sets
without a `finally`, what freezing changed for a replay, and the mode of an evaluation. Random
streams are the step's own business: the ledger has them.

Source: the attributes and their values between two steps are those of Megatron-Core 0.16.1
(megatron/core/distributed, megatron/core/transformer/moe, megatron/core/pipeline_parallel).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from megatron_moevement.integrations.megatron.expert_bias import PendingExpertBias
from megatron_moevement.integrations.megatron.freezing import (
    expect_first_step,
    forget_wanted_gradients,
)
from megatron_moevement.integrations.megatron.inventory import TRANSIENT_BUFFERS
from megatron_moevement.integrations.megatron.optimizer import CommittedGradScaler, SplitOptimizer
from megatron_moevement.integrations.megatron.router_counts import RouterCounts

_BUCKET_GROUPS = ("bucket_groups", "expert_parallel_bucket_groups")
_BETWEEN_STEPS: dict[str, Any] = {
    "grad_reduce_handle": None,
    "param_gather_handle": None,
    "param_gather_dispatched": False,
    "is_last_microbatch": True,
}
"""Of a bucket group; a stale handle or flag skips a collective that the others make."""

_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


class Transients:
    """The transients of one rank; made between two steps, and used by the training thread."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: SplitOptimizer,
        expert_bias: PendingExpertBias,
        router_counts: RouterCounts,
    ) -> None:
        """Remembers what a schedule takes away while it runs."""
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._expert_bias = expert_bias
        self._router_counts = router_counts
        self._config: Any = self._chunks[0].config
        self._functions = {name: getattr(self._config, name) for name in _FUNCTIONS}
        ddp_config = self._chunks[0].ddp_config
        self._overlaps = {name: getattr(ddp_config, name) for name in _OVERLAPS}
        self._buckets = [
            {name: getattr(chunk, name) for name in _BUCKET_GROUPS} for chunk in self._chunks
        ]
        self._gathers_ahead = [bool(each.remove_forward_pre_hook_handles) for each in self._chunks]
        self._trained = [one for each in self._chunks for one in each.parameters()]

    @torch.no_grad()
    def reset(self) -> None:
        """Makes everything look as between two steps; without collectives.

        The interrupted step's exception and its traceback must be gone: they hold its graph. Every
        bucket learns the order of its gradients anew, as in a first step, so all ranks of a stage
        must call this.
        """
        tensor_parallel_random.IS_CHECKPOINTING = False
        for name, function in self._functions.items():
            setattr(self._config, name, function)
        self._reset_freezing()
        for chunk in self._chunks:
            chunk.train()
        self._expert_bias.discard()
        self._router_counts.discard()
        clear_aux_losses_tracker()
        self._reset_modules()
        self._reset_buckets()
        self._reset_gradients()
        self._reset_optimizers()

    def _reset_freezing(self) -> None:
        """Makes every parameter one that is trained, reduced and gathered as in a first step."""
        self._optimizer.freeze(())
        for parameter in self._trained:
            parameter.requires_grad_(True)
        forget_wanted_gradients(self._chunks)
        ddp_config = self._chunks[0].ddp_config
        for name, value in self._overlaps.items():
            setattr(ddp_config, name, value)
        for chunk, buckets, gathers_ahead in zip(
            self._chunks, self._buckets, self._gathers_ahead, strict=True
        ):
            for name, groups in buckets.items():
                setattr(chunk, name, groups)
            # An interrupt may have left some of the hooks, with or without their handles.
            for module in chunk.module.modules():
                hooks = module._forward_pre_hooks  # noqa: SLF001
                for key in [key for key, hook in hooks.items() if _gathers(hook)]:
                    del hooks[key]
            chunk.remove_forward_pre_hook_handles.clear()
            if gathers_ahead:
                chunk.enable_forward_pre_hook()

    def _reset_modules(self) -> None:
        for chunk in unwrap_model(self._chunks):
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    for name in TRANSIENT_BUFFERS:
                        counter = getattr(module, name, None)
                        if counter is not None:
                            counter.zero_()

    def _reset_buckets(self) -> None:
        for group in self._bucket_groups():
            for name, value in _BETWEEN_STEPS.items():
                setattr(group, name, value)
            expect_first_step(group)

    def _reset_gradients(self) -> None:
        for chunk in self._chunks:
            chunk.force_all_reduce = False
            for parameter in chunk.parameters():
                parameter.grad = None
            chunk.zero_grad_buffer()

    def _reset_optimizers(self) -> None:
        for part in self._optimizer.parts:
            for master in part.get_parameters():
                master.grad = None
            scaler = getattr(part, "grad_scaler", None)
            if isinstance(scaler, CommittedGradScaler):
                scaler.discard()

    def _bucket_groups(self) -> Iterator[Any]:
        for chunk in self._chunks:
            for name in _BUCKET_GROUPS:
                yield from getattr(chunk, name)


def _gathers(hook: Any) -> bool:
    """Whether a hook is upstream's that gathers parameters before they are used."""
    name: str = getattr(hook, "__qualname__", "")
    return name.startswith("DistributedDataParallel._make_forward_pre_hook")
