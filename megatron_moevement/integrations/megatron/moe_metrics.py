# SPDX-License-Identifier: Apache-2.0
"""The auxiliary losses of the routers, reduced for logging; they decide no bit of the training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)

from megatron_moevement.settings.architecture import (
    Architecture,
    LoadBalancing,
    MixtureOfExperts,
    layer_pattern,
)

_NAMES = {
    LoadBalancing.AUX_LOSS: "load_balancing_loss",
    LoadBalancing.SEQ_AUX_LOSS: "seq_load_balancing_loss",
    LoadBalancing.GLOBAL_AUX_LOSS: "global_load_balancing_loss",
}


class MoEMetrics:
    """Collects what the routers of all ranks logged since the last report.

    Source: `track_moe_metrics` of megatron/core/transformer/moe/moe_utils.py, which takes the names
    from whatever the process has run so far (so that ranks can differ) and averages with an
    operation that gloo lacks.
    """

    def __init__(
        self,
        architecture: Architecture,
        moe: MixtureOfExperts,
        groups: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._device = device
        self._layers = layer_pattern(architecture, moe)
        self._per_layer = moe.moe_per_layer_logging
        balancing = zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, strict=True)
        self._names = [_NAMES[kind] for kind, weight in balancing if kind in _NAMES and weight]
        if moe.moe_z_loss_coeff:
            self._names.append("z_loss")
        if not any(self._layers):
            self._names = []

    def collect(self, passes: int) -> dict[str, float]:
        """Returns each loss averaged over MoE layers and micro-batches; every rank calls it.

        Args:
            passes: micro-batches that ran since the last call.
        """
        tracker = get_moe_layer_wise_logging_tracker()
        metrics: dict[str, float] = {}
        for name in self._names:
            values = self._reduced(tracker.get(name, {})) / passes
            metrics[name] = values.sum().item() / sum(self._layers)
            if self._per_layer:
                for layer, is_moe in enumerate(self._layers):
                    if is_moe:
                        metrics[f"moe/{name}_layer_{layer}"] = values[layer].item()
        clear_aux_losses_tracker()
        return metrics

    def forget(self) -> None:
        """Forgets what was logged since the last report."""
        clear_aux_losses_tracker()

    def _reduced(self, entry: dict[str, object]) -> torch.Tensor:
        values = entry.get("values")
        if not isinstance(values, torch.Tensor):
            values = torch.zeros(len(self._layers), device=self._device)
        own = values.clone()
        reduce_group, average_group = entry.get("reduce_group"), entry.get("avg_group")
        if isinstance(reduce_group, dist.ProcessGroup):
            dist.all_reduce(own, group=reduce_group)
            if not entry.get("reduce_group_has_dp", False):
                self._average(own, self._groups.dp)
        if isinstance(average_group, dist.ProcessGroup):
            self._average(own, average_group)
        dist.all_reduce(own, group=self._groups.pp)
        return own

    def _average(self, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(values, group=group)
        values /= group.size()
