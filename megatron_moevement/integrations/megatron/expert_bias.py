# SPDX-License-Identifier: Apache-2.0
"""The routers' `expert_bias`: its update is computed with the gradients and made at the commit."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class PendingExpertBias:
    """The update of every `expert_bias` of this rank between its reduction and its commit.

    Upstream changes the bias while it finalizes the gradients, before the step is decided; the fork
    hands the new values to `config.router_expert_bias_func` instead.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attach(self, config: TransformerConfig) -> None:
        """Receives from now on the updates of models with this config."""
        config.router_expert_bias_func = self.note

    def note(self, biases: list[torch.Tensor], updated: torch.Tensor) -> None:
        """Keeps new values, `[routers, num_experts]`, for the buffers they belong to."""
        self._pending = list(zip(biases, updated, strict=True))

    def commit(self) -> None:
        """Writes the new values into the buffers."""
        for bias, updated in self._pending:
            bias.copy_(updated)
        self._pending = []

    def discard(self) -> None:
        """Forgets the new values."""
        self._pending = []
