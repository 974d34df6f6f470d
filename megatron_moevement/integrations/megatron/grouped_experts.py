"""All local experts in one grouped GEMM, with one parameter per expert, without TransformerEngine.

The modules, parameter names and checkpoints are those of Megatron's `SequentialMLP`; only forward
and backward differ. So every tool that knows one expert's parameters knows them here as well, and
an expert can be frozen by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.nn.functional import grouped_mm


class GroupedLinear(torch.autograd.Function):
    """`y = x W_e^T` for the rows of each expert e.

    Shapes: x `[T, K]` sorted by expert, ends `[E]` int32 (where each expert's rows end), weights
    E tensors `[N, K]`, y `[T, N]`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes y."""
        ctx.save_for_backward(x, ends, *weights)
        return grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Computes the gradients of x and of the weights that want one."""
        x, ends, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        grad_y = grad_y.contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_mm(grad_y, torch.stack(weights), offs=ends)
        return grad_x, None, *_weight_gradients(x, grad_y, ends, wanted)


def _weight_gradients(
    x: torch.Tensor, grad_y: torch.Tensor, ends: torch.Tensor, wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Computes the gradients of some experts' weights with the bits that all together have.

    On the host a grouped product is one product per expert, so those of frozen experts are left
    out. On CUDA it is one kernel, and whether a kernel for fewer experts adds up in the same order
    is its own affair: with a mixture all are computed and those of frozen experts discarded.
    """
    if not any(wanted):
        return [None] * len(wanted)
    if all(wanted) or x.is_cuda:
        together = grouped_mm(grad_y.t(), x, offs=ends)
        return [together[index] if one else None for index, one in enumerate(wanted)]
    last = ends.tolist()
    return [
        torch.mm(grad_y[first:end].t(), x[first:end]) if one else None
        for first, end, one in zip([0, *last], last, wanted, strict=False)
    ]


def _grouped_linear(
    x: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    y: torch.Tensor = GroupedLinear.apply(x, ends, *weights)  # type: ignore[no-untyped-call]
    return y


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # upstream is not typed
    """Drop-in replacement of `SequentialMLP` for `--moe-grouped-gemm` with local modules.

    Source: forward follows `SequentialMLP.forward` and `MLP.forward` of
    megatron/core/transformer (moe/experts.py, mlp.py).
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Computes the local experts.

        Args:
            permuted_local_hidden_states: `[T, hidden]`, sorted by local expert.
            tokens_per_expert: `[E]`, rows of each local expert, summing to T.
            permuted_probs: `[T]`, weight of each row.

        Returns:
            `[T, hidden]`, and no bias.
        """
        x = permuted_local_hidden_states
        ends = tokens_per_expert.to(x.device).cumsum(0).to(torch.int32)
        hidden = _grouped_linear(x, ends, self._weights("linear_fc1"))
        if self.config.gated_linear_unit:
            gate, linear = hidden.chunk(2, dim=-1)
            hidden = self.config.activation_func(gate) * linear
        else:
            hidden = self.config.activation_func(hidden)
        hidden = (hidden * permuted_probs.unsqueeze(-1)).to(x.dtype)
        return _grouped_linear(hidden, ends, self._weights("linear_fc2")), None

    def _weights(self, linear: str) -> list[torch.nn.Parameter]:
        """Returns the weights of a linear layer of all experts, ready to be read.

        With `--overlap-param-gather` a hook before the forward pass of the module that owns a
        parameter waits for its gather, and these modules' own forward pass never runs.
        """
        layers = [getattr(expert, linear) for expert in self.local_experts]
        for layer in layers:
            for hook in layer._forward_pre_hooks.values():  # noqa: SLF001  (no public way)
                hook(layer, ())
        return [layer.weight for layer in layers]
