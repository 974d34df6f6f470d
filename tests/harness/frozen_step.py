# SPDX-License-Identifier: Apache-2.0
"""One step of a job with some operators frozen, beside the same step with all of them trained."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.integrations.megatron.freezing import Freezing, FrozenWork
from megatron_moevement.integrations.megatron.inventory import OperatorState, operator_states
from megatron_moevement.integrations.megatron.optimizer import GradientStatistics
from megatron_moevement.integrations.megatron.pipeline_schedule import BatchLoss, MicroBatch
from megatron_moevement.integrations.megatron.random_state import (
    random_state,
    restore_random_state,
)
from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.job.state_recipe import NumberType
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from megatron_moevement.training.job import Job
from megatron_moevement.training.steps import build_datasets, open_steps
from tests.harness.gemm_flops import gemm_flops
from tests.harness.tiny_job import tiny_job

Values = dict[str, torch.Tensor]
_UNUSED_STEP = 7777.0


@dataclasses.dataclass(frozen=True)
class Observed:
    """What one step computed on this rank."""

    loss: BatchLoss | None
    statistics: GradientStatistics
    sent: Values
    """Every tensor that went over a stage boundary, in the order of sending."""
    gradients: dict[OperatorId, Values]
    """Reduced, before clipping."""
    state: dict[OperatorId, Values]
    """After the commit and the gather."""
    random: tuple[Any, ...]
    """All streams after the step."""
    scalers: tuple[Any, ...]
    flops: int
    """Of all matrix products."""
    tokens: dict[OperatorId, int]
    """Rows that each local expert computed in the forward passes."""


class FrozenStep:
    """Repeats one step of a job from one state, with this and that frozen."""

    def __init__(
        self, job: Job, batches: Sequence[MicroBatch], work: FrozenWork = FrozenWork.SKIPPED
    ) -> None:
        """Takes the present state of the job as the state before the step."""
        self.job = job
        self.freezing = Freezing(job.chunks, job.optimizer, work)
        self._batches = list(batches)
        self._sent: Values = {}
        self._tokens: dict[OperatorId, int] = {}
        self._record_sent()
        self._record_tokens()
        job.optimizer.complete_parameters()
        self._start = self.state()
        self._random = random_state()
        self._scalers = job.optimizer.scalers()

    def operators(self) -> tuple[OperatorId, ...]:
        """Returns the operators of the whole job, in order; every rank calls it."""
        lists: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lists, [str(one) for one in self.freezing.operators])
        return tuple(sorted({OperatorId.parse(name) for names in lists for name in names}))

    @torch.no_grad()
    def restore(self, poisoned: frozenset[OperatorId] = frozenset()) -> None:
        """Puts the state before the step back.

        Args:
            poisoned: operators of which only COMPUTE is put back, as in a replay; what else they
                have is made unusable.
        """
        in_fp32 = self.job.arguments.precision.compute_type is NumberType.FP32
        for state in operator_states(self.job.chunks, self.job.optimizer):
            before = self._start[state.operator]
            for name, tensor in tensors(state):
                tensor.copy_(before[name])
                if state.operator in poisoned and name in state.optimizer:
                    if name.endswith(".step"):
                        tensor.fill_(_UNUSED_STEP)
                    elif not (in_fp32 and name.endswith(".master")):  # that one is COMPUTE, too
                        tensor.fill_(torch.nan)
        self.job.optimizer.load_scalers(self._scalers)
        restore_random_state(self._random)

    def run(
        self, active: frozenset[OperatorId], statistics: GradientStatistics | None = None
    ) -> Observed:
        """Trains the step from the state that is there; with statistics it is a replay."""
        self._sent.clear()
        self._tokens.clear()
        self.freezing.set_active(active)
        with gemm_flops() as counter:
            loss = self.job.schedule.forward_backward(self._batches)
        gradients = {
            operator: {name: _main_grad(one).clone() for name, one in parameters}
            for operator, parameters in self._parameters()
        }
        statistics = self.job.optimizer.prepare(statistics)
        self.job.optimizer.commit(statistics)
        self.job.expert_bias.commit()
        self.job.optimizer.gather()
        self.job.optimizer.complete_parameters()  # if gathers overlap in this step
        return Observed(
            loss=loss,
            statistics=statistics,
            sent=dict(self._sent),
            gradients=gradients,
            state=self.state(),
            random=random_streams(random_state()),
            scalers=self.job.optimizer.scalers(),
            flops=counter.get_total_flops(),
            tokens=dict(self._tokens),
        )

    def weight_gradient_flops(
        self, operators: frozenset[OperatorId], tokens: Mapping[OperatorId, int]
    ) -> int:
        """Returns what the weight gradients of these operators of this rank cost, from shapes.

        Args:
            operators: which; embeddings are looked up, not multiplied.
            tokens: rows of each local expert.
        """
        rows = sum(int(batch_rows(batch)) for batch in self._batches)
        flops = 0
        for operator, parameters in self._parameters():
            if operator not in operators or operator.kind is OperatorKind.EMBEDDING:
                continue
            count = tokens[operator] if operator.kind is OperatorKind.EXPERT else rows
            flops += sum(2 * count * one.numel() for _, one in parameters if one.dim() == 2)
        return flops

    def _parameters(self) -> Iterator[tuple[OperatorId, list[tuple[str, torch.nn.Parameter]]]]:
        for state in operator_states(self.job.chunks, self.job.optimizer):
            yield (
                state.operator,
                [
                    (name, tensor)
                    for name, tensor in state.compute.items()
                    if isinstance(tensor, torch.nn.Parameter)
                ],
            )

    def state(self) -> dict[OperatorId, Values]:
        """Returns a copy of compute weights, buffers and optimizer state."""
        return {
            state.operator: {name: tensor.detach().clone() for name, tensor in tensors(state)}
            for state in operator_states(self.job.chunks, self.job.optimizer)
        }

    def _record_sent(self) -> None:
        communicator: Any = self.job.schedule._communicator  # noqa: SLF001
        upstream = communicator._communicate  # noqa: SLF001

        def communicate(*, tensor_send_next: Any, tensor_send_prev: Any, **rest: Any) -> Any:
            for side, tensor in (("next", tensor_send_next), ("previous", tensor_send_prev)):
                if tensor is not None:
                    self._sent[f"{len(self._sent)} to {side}"] = tensor.detach().clone()
            return upstream(
                tensor_send_next=tensor_send_next, tensor_send_prev=tensor_send_prev, **rest
            )

        communicator._communicate = communicate  # noqa: SLF001

    def _record_tokens(self) -> None:
        for chunk in self.job.chunks:
            for module in chunk.modules():
                experts = getattr(module, "experts", None)
                if experts is not None and hasattr(module, "local_expert_indices"):
                    layer = module.layer_number - 1
                    local = [
                        OperatorId(OperatorKind.EXPERT, layer, expert)
                        for expert in module.local_expert_indices
                    ]
                    experts.register_forward_pre_hook(self._count_tokens(local))

    def _count_tokens(self, experts: Sequence[OperatorId]) -> Any:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            for operator, count in zip(experts, args[1].tolist(), strict=True):
                self._tokens[operator] = self._tokens.get(operator, 0) + count

        return hook


@contextlib.contextmanager
def opened_frozen_step(base: Sequence[str], flags: Sequence[str]) -> Iterator[FrozenStep]:
    """Yields a tiny job after two steps, ready to repeat the third.

    Args:
        base: flags that all tests share.
        flags: of the test; they win.
    """
    with (
        tiny_job(*flags, "--clip-grad=0.1", base=base) as job,
        open_steps(job, build_datasets(job), START) as step,
    ):
        for _ in range(2):
            step.run(StopRequest.NONE)
        yield FrozenStep(job, list(step.micro_batches()))


def random_streams(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the streams of a random state in what can be compared."""
    tensors = {"host": state["host"], **state["tracker"]}
    name, words, *rest = state["numpy"]
    return (
        state["python"],
        (name, words.tolist(), *rest),
        {stream: tensor.tolist() for stream, tensor in tensors.items()},
    )


def _main_grad(parameter: Any) -> torch.Tensor:
    gradient: torch.Tensor = parameter.main_grad  # upstream's own attribute
    return gradient


def batch_rows(batch: MicroBatch) -> int:
    """Returns the tokens of a micro-batch."""
    tokens = batch["position_ids"]
    assert tokens is not None
    return tokens.numel()


def tensors(state: OperatorState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields compute weights, buffers and optimizer state of an operator."""
    for part in (state.compute, state.optimizer):
        for name, value in part.items():
            if isinstance(value, torch.Tensor):
                yield name, value


def compare_frozen(
    step: FrozenStep, expected: Observed, active: frozenset[OperatorId]
) -> tuple[dict[str, list[str]], Observed]:
    """Repeats the step with only some operators active, the others with nothing but COMPUTE.

    Returns:
        What differs from the step with all active, by what it is, and under `frozen` what of a
        frozen operator changed. And the step.
    """
    own = step.freezing.operators
    trained, frozen = sorted(own & active), own - active
    step.restore(poisoned=frozen)
    before = step.state()
    seen = step.run(active, expected.statistics)
    found = {
        "loss": [] if seen.loss == expected.loss else ["loss"],
        "sent": differences(seen.sent, expected.sent),
        "random": [] if seen.random == expected.random else ["random"],
        "scalers": [] if seen.scalers == expected.scalers else ["scalers"],
        "gradient": [
            name
            for one in trained
            for name in differences(seen.gradients[one], expected.gradients[one])
        ],
        "state": [
            name for one in trained for name in differences(seen.state[one], expected.state[one])
        ],
        "frozen": [
            name
            for one in sorted(frozen)
            for name in differences(_without_bias(seen.state[one]), _without_bias(before[one]))
        ],
    }
    return {what: names for what, names in found.items() if names}, seen


def _without_bias(values: Values) -> Values:
    """Leaves out what follows from the forward pass, whatever is trained."""
    return {name: one for name, one in values.items() if not name.endswith("expert_bias")}


def differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of what is not there in both with the same bits."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not _same_bits(one[name], other[name])
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def random_active(operators: Sequence[OperatorId], seed: int) -> frozenset[OperatorId]:
    """Draws operators to train; both ends of the model together, as tied weights ask for."""
    draw = random.Random(seed)  # noqa: S311  (no secret)
    share = draw.choice((0.2, 0.5, 0.8))
    ends = draw.random() < share
    return frozenset(
        one
        for one in operators
        if (ends if one.kind >= OperatorKind.EMBEDDING else draw.random() < share)
    )
