# SPDX-License-Identifier: Apache-2.0
"""Segments: which pipeline stages are neighbours, replay together, or depend on each other."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from enum import Enum

from megatron_moevement.policy.job.boundary import Direction, is_ring, sender_stage
from megatron_moevement.policy.job.ranks import Layout

Segment = tuple[int, ...]
"""Stages that follow each other along the pipeline and replay with live sends between them."""


class Ends(Enum):
    """How the first and the last pipeline stage hang together besides the pipeline."""

    INDEPENDENT = "independent"
    TIED = "tied"
    """They share the embedding and reduce its gradient together in every step."""


class ScopeKind(Enum):
    """The shape of the set of stages that replay."""

    NONE = "none"
    SINGLE_STAGE = "single-stage"
    ADJACENT_SEGMENT = "adjacent-segment"
    DISJOINT_SEGMENTS = "disjoint-segments"
    TIED_ENDS = "tied-ends"
    """Two segments far apart, coupled by the reduction of the tied embedding's gradient."""

    WHOLE_RING = "whole-ring"
    """All stages of an interleaved pipeline: one segment that closes on itself."""

    ALL = "all"


def coupled_stages(layout: Layout, ends: Ends, stage: int) -> tuple[int, ...]:
    """Returns the stages that must replay the same steps as `stage`, itself included, ascending.

    A stage's ranks reduce gradients together; tied embeddings join the first and last stage.
    """
    last = layout.pp - 1
    if ends is Ends.TIED and last > 0 and stage in {0, last}:
        return (0, last)
    return (stage,)


def senders_to(layout: Layout, stage: int) -> tuple[tuple[Direction, int], ...]:
    """Returns from which stages a stage receives, and in which directions."""
    return tuple(
        (direction, sender)
        for direction in Direction
        if (sender := sender_stage(layout, stage, direction)) is not None
    )


def receivers_from(layout: Layout, stage: int) -> tuple[tuple[Direction, int], ...]:
    """Returns to which stages a stage sends, and in which directions."""
    opposite = {Direction.FORWARD: Direction.BACKWARD, Direction.BACKWARD: Direction.FORWARD}
    return tuple((opposite[direction], other) for direction, other in senders_to(layout, stage))


def segments_of(layout: Layout, scope: AbstractSet[int]) -> tuple[Segment, ...]:
    """Splits a set of stages into maximal runs of neighbours, by their first stage.

    In an interleaved pipeline the last and the first stage are neighbours, so a run may wrap
    round; it is then listed from where it begins. Source: appendix on concurrent failures.
    """
    runs: list[list[int]] = []
    for stage in sorted(scope):
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    wraps = len(runs) > 1 and runs[0][0] == 0 and runs[-1][-1] == layout.pp - 1
    if wraps and is_ring(layout):
        runs[0] = runs.pop() + runs[0]
    return tuple(sorted(map(tuple, runs)))


def scope_kind(layout: Layout, ends: Ends, scope: AbstractSet[int]) -> ScopeKind:
    """Returns the shape of a scope."""
    if not scope:
        return ScopeKind.NONE
    if len(scope) == layout.pp:
        return ScopeKind.WHOLE_RING if is_ring(layout) else ScopeKind.ALL
    segments = segments_of(layout, scope)
    if len(scope) == 1:
        return ScopeKind.SINGLE_STAGE
    if len(segments) == 1:
        return ScopeKind.ADJACENT_SEGMENT
    if ends is Ends.TIED and len(segments) == 2 and {0, layout.pp - 1} <= scope:
        return ScopeKind.TIED_ENDS
    return ScopeKind.DISJOINT_SEGMENTS
