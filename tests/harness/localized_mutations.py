# SPDX-License-Identifier: Apache-2.0
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
from megatron_moevement.integrations.megatron.group_references import GroupReferences, named_groups
from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.runtime.coordination.commit_barrier import Agreement, CommitBarrier, Vote
from megatron_moevement.runtime.coordination.ledger import LedgerEntry
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.strategies.moevement.carried_state import SurvivingState
from megatron_moevement.strategies.moevement.recovery.boundaries import ReplayedBoundaries
from megatron_moevement.strategies.moevement.recovery.executor import Execution
from megatron_moevement.strategies.moevement.recovery.replicas import StandingState
from megatron_moevement.strategies.moevement.recovery.survivors import Survivor

_BUFFERS = 2
"""Micro-batches in flight on the first of two stages, at most."""


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


def replay_with_other_tensor_peer() -> None:
    """Takes the tensors of another tensor rank, and compares with what that one has received."""
    boundaries = Execution.boundaries

    def of_other(self: Execution) -> ReplayedBoundaries:
        right, facts, rank = boundaries(self), self._facts, self._objects.rank
        others = {
            stage: facts.by_rank[rank._replace(pp=stage, tp=1 - rank.tp)].process
            for stage in right.processes
        }
        return dataclasses.replace(right, processes=others)

    _replace(Execution, "boundaries", of_other)


def log_by_buffer_slot() -> None:
    """Names a tensor by the buffer it is sent from: micro-batches that share one share the name.

    A pipeline of two stages has two buffers. What is sent last from one is what is found there.
    """
    reserve, land = UpstreamLog.reserve, UpstreamLog.land
    serve, logged_hash = UpstreamLog.serve, UpstreamLog.logged_hash

    def slot_of(tag: BoundaryTag) -> BoundaryTag:
        return dataclasses.replace(tag, micro_batch=tag.micro_batch % _BUFFERS)

    def reserve_slot(
        self: UpstreamLog, tag: BoundaryTag, like: torch.Tensor
    ) -> torch.Tensor | None:
        self._open_step(tag.step).places.pop(slot_of(tag), None)
        return reserve(self, slot_of(tag), like)

    _replace(UpstreamLog, "reserve", reserve_slot)
    _replace(UpstreamLog, "land", lambda self, tag, place: land(self, slot_of(tag), place))
    _replace(UpstreamLog, "serve", lambda self, tag: serve(self, slot_of(tag)))
    _replace(UpstreamLog, "logged_hash", lambda self, tag: logged_hash(self, slot_of(tag)))


def rebind_all_groups_but_one() -> None:
    """Leaves one place of the live objects without its new process group."""
    rebind = GroupReferences.rebind

    def rebind_others(self: GroupReferences) -> None:
        references = self._references
        self._references = references[1:]
        rebind(self)
        self._references = references

    _replace(GroupReferences, "rebind", rebind_others)


def remove_barrier() -> None:
    """Commits behind the gradient norm, when the ranks of one pipeline are as far.

    What a rank has to know of the others' step, it learns from these. Nobody waits for the rest.
    """
    wait = CommitBarrier.wait

    def wait_for_pipeline(self: CommitBarrier, vote: Vote) -> Agreement:
        if self.group is not None:  # the barrier of a stage that replays alone
            return wait(self, vote)
        pipeline = named_groups()["_PIPELINE_MODEL_PARALLEL_GROUP"]
        return wait(CommitBarrier(self.device, pipeline), vote)

    _replace(CommitBarrier, "wait", wait_for_pipeline)


def skip_roll_forward() -> None:
    """Counts the step that a survivor is behind, and does not apply it."""

    def count(self: Survivor, entry: LedgerEntry, write_journal: Callable[[], None]) -> None:
        del write_journal
        progress = dataclasses.replace(self._carried.scalars.progress, committed=entry.step)
        scalars = dataclasses.replace(self._carried.scalars, progress=progress)
        self._carried.live = SurvivingState.dense(scalars)

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

    def remember(self: Survivor, entry: LedgerEntry, write_journal: Callable[[], None]) -> None:
        objects = self._objects
        live = LiveOperators(objects.chunks, objects.optimizer)
        state = StandingState(live, self._carried.scalars)
        before.update((name, bytes(read(state, entry.step - 1, name)[0])) for name in state.names)
        roll_forward(self, entry, write_journal)

    def read_before(
        self: StandingState, step: int, part: str, wanted: slice
    ) -> tuple[memoryview, int]:
        if part not in before:
            return read(self, step, part, wanted)
        return memoryview(before[part])[wanted], len(before[part])

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
        replay_with_other_tensor_peer,
        log_by_buffer_slot,
        rebind_all_groups_but_one,
        remove_barrier,
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
