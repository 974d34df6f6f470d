# SPDX-License-Identifier: Apache-2.0
"""Snapshots: what of an operator's live state is captured as FULL or COMPUTE, and put back.

FULL is what an operator trains on: master weights, both moments, buffers; its step counter is the
same for all operators of a committed state and goes with the scalars. COMPUTE is what it is
computed with: compute weights and buffers. Compute weights are a pure function of the masters, so
they are cast from this rank's own masters, never read from gathered parameters, and putting them
back fills the masters with what they are cast from. With the distributed optimizer masters and
moments are this rank's shards, so COMPUTE is sharded over the replicas without further ado.

Source: section 3.2 of the paper.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron_moevement.backends.staging import Staging, pieces
from megatron_moevement.integrations.megatron.inventory import OperatorState, operator_states
from megatron_moevement.integrations.megatron.model import keep_expert_bias_in_fp32
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.transformer_config import torch_dtype
from megatron_moevement.policy.job.operators import Operator, OperatorId
from megatron_moevement.policy.job.state_recipe import Content, StateRecipe, Timing
from megatron_moevement.runtime.slots.mapped_file import checksum_of

DIGEST_CHARACTERS = 16
"""Of the digest of a rank's state."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of an operator, as it is captured.

    Attributes:
        name: unique on its rank.
        live: the tensor that is captured and put back.
        dtype: as it is captured.
    """

    name: str
    live: torch.Tensor
    dtype: torch.dtype
    timing: Timing = Timing.UNTIL_NEXT_COMMIT

    @property
    def size_bytes(self) -> int:
        """Bytes of the captured tensor."""
        return self.live.numel() * self.dtype.itemsize

    @functools.cached_property
    def elements(self) -> torch.Tensor:
        """The live elements in a row, in place; in their shape where they don't lie in a row."""
        live = self.live.detach()
        return live.view(-1) if live.is_contiguous() else live

    def taken(self) -> torch.Tensor:
        """Returns what is read of it until the next commit: a copy where it changes before that."""
        return self.elements.clone() if self.timing is Timing.AT_ONCE else self.elements


class LiveOperators:
    """The operators of one rank; built once, after the optimizer's state is there.

    The tensors stay the same from then on: every step changes them in place.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: SplitOptimizer) -> None:
        """Finds the tensors.

        Raises:
            AssertionError: a tensor belongs to no operator, or nobody knows what the optimizer
                keeps it for: whether it is changed in place, and what else goes with it.
        """
        self._optimizer = optimizer
        for chunk in chunks:
            keep_expert_bias_in_fp32(chunk)
        recipe = optimizer.recipe
        states = operator_states(chunks, optimizer)
        for state in states:
            _check_optimizer_state(state, recipe)
        self._full, self._compute = (
            {state.operator: _pieces(state, recipe, content) for state in states}
            for content in (Content.FULL, Content.COMPUTE)
        )
        self._counters = {
            state.operator: [kept[recipe.counter] for kept in state.kept.values()]
            for state in states
        }

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators of this rank with their bytes, ascending."""
        return tuple(
            Operator(
                operator,
                full_bytes=sum(piece.size_bytes for piece in full),
                compute_bytes=sum(piece.size_bytes for piece in self._compute[operator]),
            )
            for operator, full in sorted(self._full.items())
        )

    def pieces(self, operator: OperatorId, content: Content) -> tuple[Piece, ...]:
        """Returns the tensors of an operator, larger elements first, so that all are aligned."""
        return (self._full if content is Content.FULL else self._compute)[operator]

    @torch.no_grad()
    def put_back(
        self, operator: OperatorId, content: Content, host: Sequence[torch.Tensor]
    ) -> None:
        """Fills an operator's live tensors; `complete` must follow before anybody computes.

        Args:
            host: the captured elements, in the order of `pieces`.
        """
        staging = Staging()
        for piece in pieces(host, [piece.elements for piece in self.pieces(operator, content)]):
            staging.copy(*piece)

    @torch.no_grad()
    def set_step(self, operators: Iterable[OperatorId], step: int) -> None:
        """Sets the optimizer's step counters of operators.

        apex and TransformerEngine count per group of parameters: there the counter is everybody's
        and `SplitOptimizer.set_group_steps` sets it.
        """
        for operator in operators:
            for counter in self._counters[operator]:
                if isinstance(counter, torch.Tensor):
                    counter.fill_(step)

    def digest(self, content: Content = Content.FULL) -> Callable[[], str] | None:
        """Returns what computes the digest of all operators: see `digest_of`.

        Args:
            content: FULL reads all of the state, COMPUTE what the rest follows from: masters, from
                which compute weights are cast, and buffers.
        """
        pieces = self._full if content is Content.FULL else self._compute
        return digest_of(piece for operator in sorted(pieces) for piece in pieces[operator])

    @torch.no_grad()
    def complete(self) -> None:
        """Derives all compute weights from the masters; every rank of a stage calls it."""
        for access in self._optimizer.masters:
            access.cast()
        self._optimizer.gather()
        self._optimizer.complete_parameters()


def digest_of(pieces: Iterable[Piece]) -> Callable[[], str] | None:
    """Returns what computes a digest of tensors as they are now; None on a device.

    Any thread may compute it, before the next commit. It has `DIGEST_CHARACTERS`. All of the
    tensors are read, which would take kernels and a wait of the host on a device.
    """
    pieces = tuple(pieces)
    if any(piece.live.device.type != "cpu" for piece in pieces):
        return None
    return functools.partial(_digest, [piece.taken() for piece in pieces])


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    flat = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    sums = [checksum_of(each.numpy().data) for each in flat]
    return f"{checksum_of(struct.pack(f'<{len(sums)}Q', *sums)):0{DIGEST_CHARACTERS}x}"


def _check_optimizer_state(state: OperatorState, recipe: StateRecipe) -> None:
    full = {tensor.key: tensor.held_as for tensor in recipe.captured(Content.FULL)}
    for parameter, kept in state.kept.items():
        for key, value in kept.items():
            if key in full and not isinstance(value, torch.Tensor):
                raise AssertionError(f"{parameter}.{key} is {type(value).__name__}, no tensor")
        if kept.keys() != {*full, recipe.counter}:
            raise AssertionError(
                f"the optimizer keeps {', '.join(sorted(kept))} of {parameter}: snapshots are made "
                f"of {', '.join(sorted(full))} and {recipe.counter}"
            )
        found = {key: kept[key] for key in full} | {"weight": state.compute[parameter]}
        for key, held_as in {**full, "weight": recipe.compute}.items():
            if found[key].dtype is not torch_dtype(held_as):
                raise AssertionError(
                    f"{parameter}: {key} is {found[key].dtype}, in its recipe {held_as.value}"
                )


def _pieces(state: OperatorState, recipe: StateRecipe, content: Content) -> tuple[Piece, ...]:
    trained = [
        Piece(f"{name}.{each.key}", kept[each.key], torch_dtype(each.held_as), each.timing)
        for name, kept in state.kept.items()
        for each in recipe.captured(content)
    ]
    buffers = [
        Piece(name, tensor, tensor.dtype, Timing.AT_ONCE)
        for name, tensor in state.compute.items()
        if not isinstance(tensor, torch.nn.Parameter)
    ]
    return tuple(sorted(trained + buffers, key=lambda one: (-one.dtype.itemsize, one.name)))
