# SPDX-License-Identifier: Apache-2.0
"""What the routers of a rank send to which expert, counted on the device, window by window.

A router's map of a micro-batch is added up where it is made, and nothing of it is read on the host
before the window is over. It is counted where gradients are wanted: so not in an evaluation, and of
a layer that is computed again for its gradients the second time alone. Numbers are whole, so every
order of additions, and a replay, gives the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.popularity import CountedSteps
from megatron_moevement.runtime.interrupts.host_wait import await_on_host

_PROBABILITY_PARTS = 1 << 16
"""Probabilities are summed up in such parts of one."""


class RouterCounts:
    """The counts of one rank; its training thread uses it.

    Steps that are not committed don't count. What is kept is that of steps in a row: a replay
    begins with its first step, and comes to what was counted the first time.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        moe_layers: Sequence[int],
        num_experts: int,
        ordering: Ordering,
        device: torch.device,
    ) -> None:
        """Counts from now on, unless experts are ordered by index or there are none.

        Args:
            chunks: of this rank; their routers tell what they do.
            moe_layers: the layers of the whole model that have experts, ascending from 0.
            ordering: what is counted, the same on all ranks.
        """
        self.ordering = ordering if moe_layers else Ordering.INDEX
        self._rows = {layer: row for row, layer in enumerate(moe_layers)}
        shape = (len(moe_layers), num_experts)
        self._step = torch.zeros(shape, dtype=torch.int64, device=device)
        self._window = torch.zeros_like(self._step)
        self._counted = CountedSteps()
        if self.is_counting:
            for chunk in unwrap_model(list(chunks)):
                for module in chunk.modules():
                    if isinstance(module, TopKRouter):
                        module.register_forward_hook(self._note)

    @property
    def is_counting(self) -> bool:
        """Whether anything is counted."""
        return self.ordering is not Ordering.INDEX

    @property
    def num_experts(self) -> int:
        """Of each layer that has experts."""
        return self._step.shape[1]

    def _note(self, router: Any, _: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Counts what a router has done with a micro-batch.

        Upstream counts for `expert_bias` under the same condition; evaluation trains nothing.
        """
        if not (router.training and torch.is_grad_enabled()):
            return
        probabilities, routing_map = routed
        with torch.no_grad():
            if self.ordering is Ordering.SOFT:
                sums = probabilities.sum(dim=0, dtype=torch.float32)
                counts = (sums * _PROBABILITY_PARTS).round().to(torch.int64)
            else:
                counts = routing_map.sum(dim=0, dtype=torch.int64)
            self._step[self._rows[router.layer_number - 1]] += counts

    def commit(self, step: int, *, begins_window: bool) -> None:
        """Adds what was counted in a step that is committed; no collective.

        Args:
            begins_window: whether what was counted before is of a window that is over.
        """
        self._counted = self._counted.with_step(step, begins_window=begins_window)
        if self._counted.first == step:
            self._window.zero_()
        self._window += self._step
        self._step.zero_()

    def discard(self) -> None:
        """Forgets what was counted in a step that is not committed."""
        self._step.zero_()

    def reduced(self, steps: range) -> list[int] | None:
        """Returns the counts of all experts over all ranks, by layer and number; all ranks call it.

        Args:
            steps: that are over.

        Returns:
            None where a rank has not counted each of them.
        """
        is_whole = self._counted.are(steps)
        own = torch.cat([self._window.flatten(), self._window.new_tensor([is_whole])])
        await_on_host(dist.all_reduce(own, async_op=True))
        *counts, whole = own.tolist()
        return counts if whole == dist.get_world_size() else None


def moe_layers_of(pattern: Iterable[bool]) -> list[int]:
    """Returns the numbers of the layers that have experts."""
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]
