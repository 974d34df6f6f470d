# SPDX-License-Identifier: Apache-2.0
"""The fault-free run: what every rank's state and every ledger entry must be after each step."""

from __future__ import annotations

from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.testing.world import arithmetic
from megatron_moevement.testing.world.arithmetic import Entry, Local
from megatron_moevement.testing.world.live import Live
from megatron_moevement.testing.world.scenario import Scenario
from megatron_moevement.testing.world.shape import Shape
from megatron_moevement.testing.world.values import History


def initial_state(history: History, shape: Shape, rank: LogicalRank) -> Live:
    """Returns S_0 of a rank: a pure function of the job's seed."""
    operators = [operator for part in shape.parts[rank] for operator in part.operators]
    tied = {operator: "tied" for both in shape.schedule.inventory.tied for operator in both}
    return Live(
        step=0,
        active={
            operator: history.of("initial", tied.get(operator, operator.number))
            for operator in operators
        },
        frozen={},
        bias={
            operator: history.of("bias", operator.number)
            for operator in operators
            if operator.kind is OperatorKind.GATE
        },
        scalers=[history.of("scaler", "dense"), history.of("scaler", "expert")],
        cursor=history.of("cursor"),
    )


class Reference:
    """The fault-free run, computed step by step as far as it is asked for."""

    def __init__(self, history: History, scenario: Scenario, shape: Shape) -> None:
        self._history = history
        self._shape = shape
        self._overflows = {step: (dense, expert) for step, dense, expert in scenario.overflows}
        self._states = [{rank: initial_state(history, shape, rank) for rank in shape.layout.ranks}]
        self._entries: list[Entry] = []

    def found_inf(self, step: int) -> tuple[bool, bool]:
        """Returns whether the gradients of a step overflow: decided by the data, not by faults."""
        return self._overflows.get(step, (False, False))

    def state(self, step: int, rank: LogicalRank) -> Live:
        """Returns S_step of a rank."""
        while len(self._states) <= step:
            self._advance()
        return self._states[step][rank]

    def entry(self, step: int) -> Entry:
        """Returns the ledger entry of a step."""
        self.state(step, self._shape.layout.ranks[0])
        return self._entries[step - 1]

    def _advance(self) -> None:
        step = len(self._states)
        before = self._states[-1]
        locals_ = self._forward_backward(before)
        reduced = {
            group: arithmetic.reduce(self._history, self._shape, {r: locals_[r] for r in group})
            for group in set(self._shape.groups)
        }
        by_stage = [reduced[group] for group in self._shape.groups]
        norm = self._history.of("norm", *(result.stands_for for result in by_stage))
        loss = by_stage[-1].loss
        self._entries.append(Entry(loss, norm, self.found_inf(step)))
        after = {rank: state.copy() for rank, state in before.items()}
        for rank, state in after.items():
            given = (self._history, state, by_stage[rank.pp], self._entries[-1])
            arithmetic.apply_gradients(*given, list(state.active))
            arithmetic.end_step(*given)
        self._states.append(after)

    def _forward_backward(self, states: dict[LogicalRank, Live]) -> dict[LogicalRank, Local]:
        shape, history = self._shape, self._history
        locals_: dict[LogicalRank, Local] = {}
        for first in shape.layout.stage_ranks(0):
            ranks = shape.pipelines[first]
            chain = [(rank, chunk) for chunk in range(shape.layout.chunks) for rank in ranks]
            weights = [
                arithmetic.weights_of(history, states[rank], shape.parts[rank][chunk])
                for rank, chunk in chain
            ]
            inputs: list[list[int]] = [[] for _ in chain]
            upstream: list[list[int]] = [[] for _ in chain]
            losses: list[int] = []
            scale = states[ranks[-1]].scalers[0]
            for micro_batch in range(shape.micro_batches):
                x = arithmetic.batch(history, first, states[first].cursor, micro_batch)
                for place, weight in enumerate(weights):
                    inputs[place].append(x)
                    x = history.of("forward", x, weight)
                losses.append(x)
                gradient = history.of("scaled", x, scale)
                for place in reversed(range(len(chain))):
                    upstream[place].append(gradient)
                    gradient = history.of(
                        "backward", gradient, inputs[place][micro_batch], weights[place]
                    )
            for rank in ranks:
                chunks = tuple(
                    history.of("chunk", weights[place], *inputs[place], *upstream[place])
                    for place, (other, _) in enumerate(chain)
                    if other == rank
                )
                is_last = rank.pp == shape.layout.pp - 1
                locals_[rank] = Local(chunks, frozenset(), tuple(losses) if is_last else ())
        return locals_
