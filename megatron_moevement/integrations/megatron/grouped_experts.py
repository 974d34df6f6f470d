# SPDX-License-Identifier: Apache-2.0
"""All local experts in one grouped GEMM, with one parameter per expert, without TransformerEngine.

The modules, parameter names and checkpoints are those of Megatron's `SequentialMLP`; only forward
and backward differ. So every tool that knows one expert's parameters knows them here as well, and
an expert can be frozen by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
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
        return _grouped_mm(x, _side_by_side(weights).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Computes the gradients of x and of the weights that want one."""
        x, ends, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        grad_y = grad_y.contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_mm(grad_y, _side_by_side(weights), ends)
        return grad_x, None, *_weight_gradients(x, grad_y, ends, wanted)


def _grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies the rows of each expert by its matrix; CUDA's kernel refuses to have no rows."""
    if not len(rows):
        return rows.new_empty(0, matrices.shape[2])
    return grouped_mm(rows, matrices, offs=ends)


def _side_by_side(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns all weights as one tensor, in place where they lie at equal distances in memory."""
    first, size = weights[0], weights[0].numel()
    starts = [weight.storage_offset() for weight in weights]
    step = starts[1] - starts[0] if len(starts) > 1 else size
    storage = first.untyped_storage().data_ptr()
    if (
        step >= size
        and starts == [starts[0] + index * step for index in range(len(starts))]
        and all(one.untyped_storage().data_ptr() == storage for one in weights)
        and all(one.is_contiguous() for one in weights)
    ):
        return first.as_strided((len(weights), *first.shape), (step, *first.stride()))
    return torch.stack(list(weights))


def _leaves_empty_groups(device: torch.device) -> bool:
    """Whether a kernel leaves the weight gradients of experts without rows as they were in memory.

    Source: https://github.com/pytorch/pytorch/issues/172439
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


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
        together = _all_weight_gradients(x, grad_y, ends)
        return [together[index] if one else None for index, one in enumerate(wanted)]
    last = ends.tolist()
    return [
        torch.mm(grad_y[first:end].t(), x[first:end]) if one else None
        for first, end, one in zip([0, *last], last, wanted, strict=False)
    ]


def _all_weight_gradients(
    x: torch.Tensor, grad_y: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    if not len(x):
        return x.new_zeros(len(ends), grad_y.shape[1], x.shape[1])
    gradients = grouped_mm(grad_y.t(), x, offs=ends)
    if _leaves_empty_groups(x.device):
        idle = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        gradients.masked_fill_(idle[:, None, None], 0.0)
    return gradients


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
        layers = self._layers(linear)
        for layer in layers:
            for hook in layer._forward_pre_hooks.values():  # noqa: SLF001  (no public way)
                hook(layer, ())
        return [layer.weight for layer in layers]

    def lay_out(self) -> None:
        """Moves the experts' weights next to each other, where each has memory of its own."""
        for linear in ("linear_fc1", "linear_fc2"):
            weights = [layer.weight for layer in self._layers(linear)]
            places = torch.stack([weight.data for weight in weights])
            for weight, place in zip(weights, places, strict=True):
                weight.data = place

    def _layers(self, linear: str) -> list[Any]:
        return [getattr(expert, linear) for expert in self.local_experts]


@contextlib.contextmanager
def ascending_in_buffers(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Lets the weights of experts on a GPU ascend in the buffers that upstream lays out within.

    It fills them from the last parameter to the first, and a tensor can't have a negative stride.
    On the host the order stays: shards begin elsewhere with it, and sums over them round otherwise.
    """
    lists = [
        experts.local_experts._modules  # noqa: SLF001  (no public way to order a list)
        for chunk in chunks
        for experts in chunk.modules()
        if isinstance(experts, GroupedExperts) and _is_on_gpu(experts)
    ]
    _reverse(lists)
    try:
        yield
    finally:
        _reverse(lists)


def _is_on_gpu(experts: GroupedExperts) -> bool:
    return bool(next(experts.parameters()).is_cuda)


def _reverse(orders: Iterable[dict[str, torch.nn.Module | None]]) -> None:
    for order in orders:
        for name in list(order)[::-1]:
            order[name] = order.pop(name)
