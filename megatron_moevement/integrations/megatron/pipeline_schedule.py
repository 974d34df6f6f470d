# SPDX-License-Identifier: Apache-2.0
"""One pass of all micro-batches through the pipeline, forward and backward or forward alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from megatron_moevement.integrations.megatron.expert_bias import PendingExpertBias
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.stage_communicator import (
    ForwardPass,
    StageCommunicator,
)
from megatron_moevement.runtime.faults.fault_points import Strike, pass_by
from megatron_moevement.settings.faults import FaultPoint

MicroBatch = Mapping[str, torch.Tensor | None]
"""tokens, labels, loss_mask and position_ids, each `[micro_batch_size, seq_length]`."""


def masked_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sums the losses of the tokens that count.

    Args:
        loss_mask: `[micro_batch_size, seq_length]`, 1 where a token counts.
        losses: `[micro_batch_size, seq_length]`, the loss of each token.

    Returns:
        Sum of the losses, number of tokens that count, and both as `[2]` for reporting.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    report = torch.stack([total.detach(), tokens.float()])
    return total, tokens, {"lm loss": report}


@dataclasses.dataclass(frozen=True)
class BatchLoss:
    """The loss of a global batch, known on the last stage."""

    mean: float
    num_tokens: int


@dataclasses.dataclass
class Passes:
    """Passes of micro-batches through model chunks since the start of the process."""

    forward: int = 0
    backward: int = 0

    def since(self, before: Passes) -> Passes:
        """Returns how many there were after a moment."""
        return Passes(self.forward - before.forward, self.backward - before.backward)


class PausedReductions:
    """Lets gradients add up over micro-batches before they are reduced; a context.

    It replaces upstream's `DistributedDataParallel.no_sync` (0.16.1), a generator. Upstream's
    interleaved schedule enters that without a `with`. An interrupt then leaves a generator behind
    whose `finally` runs when its garbage is collected: in the middle of a later step, whose
    gradients would be reduced before all of them are there. This one does nothing then.
    """

    def __init__(self, chunk: DistributedDataParallel) -> None:
        self._chunk = chunk

    def __enter__(self) -> None:
        """Pauses."""
        self._reduce(in_this_pass=False)

    def __exit__(self, *exception: object) -> None:
        """Reduces what the next backward pass completes."""
        self._reduce(in_this_pass=True)

    def _reduce(self, *, in_this_pass: bool) -> None:
        for group in (*self._chunk.bucket_groups, *self._chunk.expert_parallel_bucket_groups):
            group.is_last_microbatch = in_this_pass


class PipelineSchedule:
    """Runs micro-batches through the stages; every rank of the job calls it in the same step."""

    def __init__(
        self,
        config: TransformerConfig,
        chunks: Sequence[DistributedDataParallel],
        optimizer: SplitOptimizer,
        groups: ProcessGroupCollection,
        expert_bias: PendingExpertBias,
        *,
        seq_length: int,
        micro_batch_size: int,
        num_microbatches: int,
    ) -> None:
        self._config = config
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._groups = groups
        self._shape = {
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "num_microbatches": num_microbatches,
        }
        self.passes = Passes()
        self._communicator = StageCommunicator(groups.pp, config)
        config.grad_scale_func = optimizer.megatron.scale_loss
        config.finalize_model_grads_func = self._finalize
        self._strike: Strike = pass_by
        self._after_forward: Callable[[], None] | None = None
        expert_bias.attach(config)
        if chunks[0].ddp_config.overlap_grad_reduce:
            pauses = [partial(PausedReductions, chunk) for chunk in chunks]
            config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]

    @property
    def num_microbatches(self) -> int:
        """Forward passes of each model chunk in a step."""
        return self._shape["num_microbatches"]

    @contextlib.contextmanager
    def communicating_by(self, communicator: StageCommunicator) -> Iterator[None]:
        """Sends over stage boundaries by another communicator, until the block ends."""
        before, self._communicator = self._communicator, communicator
        try:
            yield
        finally:
            self._communicator = before

    def after_next_forward(self, action: Callable[[], None] | None) -> None:
        """Has something done once, after the next forward pass; None takes it back."""
        self._after_forward = action

    def forward_backward(
        self,
        micro_batches: Iterable[MicroBatch],
        strike: Strike = pass_by,
        step: int | None = None,
    ) -> BatchLoss | None:
        """Computes gradients and reduces them; returns the loss on the last stage.

        Args:
            step: k of the step; a communicator that logs wants to know it.
        """
        self._strike = strike
        self._communicator.before_next_send(None)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.megatron.zero_grad()
        with self._communicator.training_pass(step, self._shape["num_microbatches"]):
            return self._run(micro_batches, forward_only=False)

    def forward(self, micro_batches: Iterable[MicroBatch]) -> BatchLoss | None:
        """Computes the loss alone, without dropout; returns it on the last stage."""
        for chunk in self._chunks:
            chunk.eval()
        with torch.no_grad():
            loss = self._run(micro_batches, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        return loss

    def _run(self, micro_batches: Iterable[MicroBatch], *, forward_only: bool) -> BatchLoss | None:
        batches = list(micro_batches)
        middle = len(batches) // 2
        marked = [
            (number, number == middle and not forward_only, batch)
            for number, batch in enumerate(batches)
        ]
        iterators = [iter(marked) for _ in self._chunks]
        interleaved = len(self._chunks) > 1
        reports = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=self._chunks if interleaved else self._chunks[0],
            forward_only=forward_only,
            p2p_communicator=self._communicator,
            pg_collection=self._groups,
            **self._shape,
        )
        return self._loss(reports)

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        self._strike(FaultPoint.FINALIZE)
        finalize_model_grads(*args, **kwargs)
        self._strike(FaultPoint.AFTER_FINALIZE)

    def _forward_step(
        self, batches: Iterator[tuple[int, bool, MicroBatch]], chunk: DistributedDataParallel
    ) -> tuple[torch.Tensor, partial[Any] | None]:
        number, is_halfway, batch = next(batches)
        if is_halfway:
            self._strike(FaultPoint.FORWARD)
        output = chunk(
            batch["tokens"],
            batch["position_ids"],
            None,  # attention is causal
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
        self._communicator.computed(
            ForwardPass(
                chunk=self._chunks.index(chunk),
                micro_batch=number,
                received=unwrap_model(chunk).decoder.input_tensor,
                output=output,
            )
        )
        self.passes.forward += 1
        action, self._after_forward = self._after_forward, None
        if action is not None:
            action()
        if output.requires_grad:
            output.register_hook(self._count_backward)
        if is_halfway:
            self._pass_after_forward(output)
        loss_mask = batch["loss_mask"]
        return output, None if loss_mask is None else partial(masked_loss, loss_mask)

    def _pass_after_forward(self, output: torch.Tensor) -> None:
        strike = self._strike
        strike(FaultPoint.FORWARD_BACKWARD)
        self._communicator.before_next_send(lambda: strike(FaultPoint.BOUNDARY_SEND))
        if output.requires_grad:  # not on a stage that is frozen as a whole
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda _: strike(FaultPoint.BACKWARD)
            )

    def _count_backward(self, gradient: torch.Tensor) -> None:
        del gradient
        self.passes.backward += 1

    def _loss(self, reports: Sequence[Mapping[str, torch.Tensor]]) -> BatchLoss | None:
        """Returns the mean loss per token over all micro-batches and replicas, on the last stage.

        Source: `train_step` of megatron/training/training.py.
        """
        if not reports:
            return None
        total = torch.vstack([report["lm loss"] for report in reports]).sum(dim=0)
        dist.all_reduce(total, group=self._groups.dp_cp)
        mean = total[0] / total[1]
        return BatchLoss(mean=mean.item(), num_tokens=int(total[1].item()))
