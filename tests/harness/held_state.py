# SPDX-License-Identifier: Apache-2.0
"""What a job's model and optimizers hold, by upstream's names: damaged, captured, compared."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.job.operators import OperatorId
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from megatron_moevement.training.job import Job
from megatron_moevement.training.steps import build_datasets, open_steps

Tensors = dict[str, torch.Tensor]


def train(job: Job) -> None:
    """Trains two steps."""
    with open_steps(job, build_datasets(job), START) as step:
        for _ in range(2):
            step.run(StopRequest.NONE)
    job.optimizer.complete_parameters()


def held(job: Job) -> tuple[Tensors, Tensors]:
    """Returns every tensor of model and optimizers by a name; nothing of ours is asked."""
    model = {
        f"chunk{index}.{name}": value
        for index, chunk in enumerate(job.chunks)
        for name, value in chunk.module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    parts = [part.optimizer for part in job.optimizer.parts if not part.is_stub_optimizer]
    optimizers = {
        f"optimizer{index}.{number}.{key}": value
        for index, optimizer in enumerate(parts)
        for number, (stepped, state) in enumerate(optimizer.state.items())
        for key, value in {"stepped": stepped, **state}.items()
    }
    assert all(isinstance(value, torch.Tensor) for value in optimizers.values())
    return model, optimizers


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def flip(tensor: torch.Tensor) -> None:
    """Changes every byte; the same again brings all of them back."""
    bits(tensor).bitwise_xor_(0x5A)


def captured(live: LiveOperators, content: Content) -> dict[OperatorId, list[torch.Tensor]]:
    """Returns what a snapshot of each operator holds."""
    return {
        operator.id: [
            piece.elements.to(piece.dtype, copy=True) for piece in live.pieces(operator.id, content)
        ]
        for operator in live.operators
    }


def equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Returns whether tensors have the same bits."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


def wrong_after_loss(job: Job, live: LiveOperators, content: Content) -> set[str]:
    """Captures all operators, damages everything, puts back; returns what is not as before."""
    model, optimizers = held(job)
    everything = model | optimizers
    before = {name: tensor.detach().clone() for name, tensor in everything.items()}
    step = job.optimizer.adam_step()
    snapshot = captured(live, content)
    for tensor in {one.data_ptr(): one for one in everything.values()}.values():
        flip(tensor)
    for operator, host in snapshot.items():
        live.put_back(operator, content, host)
    if content is Content.FULL:
        live.set_step(snapshot, step)
    live.complete()
    wrong = {name for name, now in everything.items() if not equal([now], [before[name]])}
    for name, tensor in everything.items():
        tensor.detach().copy_(before[name])
    return wrong
