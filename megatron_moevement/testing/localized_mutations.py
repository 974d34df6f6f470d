"""Mutations of a localized recovery: what a rank does wrongly so that a test of it must fail.

A mutation replaces functions of the program by name, in the process of a rank, before it trains.
Nothing in the program knows of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_moevement.integrations.megatron.expert_bias import PendingExpertBias
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.boundary import BoundaryTag
from megatron_moevement.runtime.ledger import LedgerEntry
from megatron_moevement.runtime.upstream_log import UpstreamLog
from megatron_moevement.strategies.kept import Live
from megatron_moevement.strategies.replicas import StandingState
from megatron_moevement.strategies.survivors import Survivor


def do_nothing() -> None:
    """Replaces nothing: what is left must be green."""


def serve_step_before() -> None:
    """Serves what was sent a step before, where that is still in the log."""
    serve, logged_hash = UpstreamLog.serve, UpstreamLog.logged_hash

    def before(self: UpstreamLog, tag: BoundaryTag) -> BoundaryTag:
        earlier = dataclasses.replace(tag, step=tag.step - 1)
        return earlier if earlier in self.sent(earlier.step) else tag

    def serve_before(self: UpstreamLog, tag: BoundaryTag) -> torch.Tensor:
        return serve(self, before(self, tag))

    def hash_before(self: UpstreamLog, tag: BoundaryTag) -> int:
        return logged_hash(self, before(self, tag))

    _replace(UpstreamLog, "serve", serve_before)
    _replace(UpstreamLog, "logged_hash", hash_before)


def serve_other_micro_batch() -> None:
    """Serves the tensor of the micro-batch after."""
    serve, logged_hash = UpstreamLog.serve, UpstreamLog.logged_hash

    def other(self: UpstreamLog, tag: BoundaryTag) -> BoundaryTag:
        after = dataclasses.replace(tag, micro_batch=tag.micro_batch + 1)
        return after if after in self.sent(tag.step) else tag

    def serve_other(self: UpstreamLog, tag: BoundaryTag) -> torch.Tensor:
        return serve(self, other(self, tag))

    def hash_other(self: UpstreamLog, tag: BoundaryTag) -> int:
        return logged_hash(self, other(self, tag))

    _replace(UpstreamLog, "serve", serve_other)
    _replace(UpstreamLog, "logged_hash", hash_other)


def skip_roll_forward() -> None:
    """Counts the step that a survivor is behind, and does not apply it."""

    def count(self: Survivor, entry: LedgerEntry) -> None:
        progress = dataclasses.replace(self.scalars.progress, committed=entry.step)
        scalars = dataclasses.replace(self.scalars, progress=progress)
        self._kept.live = Live.dense(scalars)

    _replace(Survivor, "roll_forward", count)


def keep_noted_expert_bias() -> None:
    """Lets a survivor keep the `expert_bias` of the step that was interrupted."""
    _replace(PendingExpertBias, "discard", PendingExpertBias.commit)


def keep_random_streams() -> None:
    """Lets bystanders go on with the random numbers of the interrupted step."""

    def stand_by(self: Survivor, live: LiveOperators) -> None:
        del self
        live.complete()

    _replace(Survivor, "stand_by", stand_by)


def copy_before_roll_forward() -> None:
    """Gives replicas the state of before the roll-forward, one step behind."""
    roll_forward = Survivor.roll_forward
    read = StandingState.read
    before: dict[str, bytes] = {}

    def remember(self: Survivor, entry: LedgerEntry) -> None:
        trained = self._trained
        live = LiveOperators(trained.chunks, trained.optimizer)
        state = StandingState(live, self.scalars)
        before.update((name, bytes(read(state, entry.step - 1, name))) for name in state.names)
        roll_forward(self, entry)

    def read_before(self: StandingState, step: int, name: str) -> memoryview:
        return memoryview(before[name]) if name in before else read(self, step, name)

    _replace(Survivor, "roll_forward", remember)
    _replace(StandingState, "read", read_before)


def copy_no_step_counters() -> None:
    """Lets who copies a state count the steps of its optimizer from the start."""
    _replace(SplitOptimizer, "set_group_steps", lambda self, step: None)
    _replace(LiveOperators, "set_step", lambda self, operators, step: None)


LOCALIZED_MUTATIONS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        do_nothing,
        serve_step_before,
        serve_other_micro_batch,
        skip_roll_forward,
        keep_noted_expert_bias,
        keep_random_streams,
        copy_before_roll_forward,
        copy_no_step_counters,
    )
}
"""By name."""


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: a mutation of nothing shows nothing"
    setattr(owner, name, function)
