# SPDX-License-Identifier: Apache-2.0
"""Popularity: what is known of how often experts are activated, and when that asks for an order.

Tokens are counted by window, and summed up over all ranks. Everything is in whole numbers, so that
ranks, and a replay, come to the same whatever the order of their sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.window.ordering import Ordering
from megatron_moevement.policy.window.timetable import Timetable

SCORE_DIGITS = 13
"""Of a score at most."""
_SCORE_BITS = 40
_DECAY_PARTS = 1_000_000
_AVERAGED_PARTS = 1_000
"""A moving average counts thousandths of a token."""


@dataclasses.dataclass(frozen=True)
class Popularity:
    """What all ranks know of their experts, in the order of layer and number.

    Attributes:
        ordering: what the scores are: counts, probabilities or averages.
        scores: of the newest windows; empty before the first one was counted.
        ordered_by: scores that the newest order was asked for with; empty before the first one.
    """

    ordering: Ordering
    scores: tuple[int, ...] = ()
    ordered_by: tuple[int, ...] = ()

    def after_window(self, counts: Sequence[int] | None, decay: float) -> Popularity:
        """Returns what is known after one more window.

        Args:
            counts: of the window, all ranks together; None where some rank has not counted all of
                its steps: they are passed over.
            decay: how much of the former average stays (alpha of the paper's appendix).
        """
        if counts is None:
            return self
        scores = tuple(counts)
        if self.ordering is Ordering.DECAYED:
            scores = _averaged(self.scores, scores, decay)
        scores = _within_bits(scores)
        known = dataclasses.replace(self, scores=scores)
        if must_reorder(self.ordered_by, scores):
            known = dataclasses.replace(known, ordered_by=scores)
        return known

    def of_experts(self, operators: Iterable[OperatorId]) -> Mapping[OperatorId, int]:
        """Returns the scores that experts are to be ordered by; nothing before there are any."""
        experts = sorted(one for one in operators if one.kind is OperatorKind.EXPERT)
        if len(experts) != len(self.ordered_by):
            return {}
        return dict(zip(experts, self.ordered_by, strict=True))

    def document(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "ordering": self.ordering.value,
            "scores": list(self.scores),
            "ordered_by": list(self.ordered_by),
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Self:
        """Returns what `document` returned."""
        return cls(
            Ordering(document["ordering"]),
            tuple(document["scores"]),
            tuple(document["ordered_by"]),
        )


class CountedSteps(NamedTuple):
    """The steps in a row that a rank has counted the tokens of; none at first."""

    first: int = 1
    last: int = 0

    def with_step(self, step: int, *, begins_window: bool) -> CountedSteps:
        """Returns what is counted with one more step; where it begins with that, all else goes.

        Args:
            begins_window: whether what was counted before is of a window that is over.
        """
        goes_on = step == self.last + 1 and not begins_window
        return CountedSteps(self.first if goes_on else step, step)

    def are(self, steps: range) -> bool:
        """Returns whether these steps are counted, and no others."""
        return self == (steps.start, steps.stop - 1)


def steps_to_reduce(timetable: Timetable, step: int) -> range | None:
    """Returns of which steps all ranks add up their counts at the barrier of a step.

    Those are the steps of the window before, in the first step of a window. A window of one slot
    orders nothing: all ranks would wait for each other in each step for nothing.

    Returns:
        None within a window, and where W = 1; no steps where none was counted under a known
        schedule, or W was 1.
    """
    window = timetable.window_of(step)
    if window.start != step or window.size == 1:
        return None
    if step - 1 < timetable.first_step or (before := timetable.window_of(step - 1)).size == 1:
        return range(0)
    return range(max(before.start, 1), step)


def room_for(experts: int) -> int:
    """Returns the bytes that the popularity of so many experts takes at most, as JSON."""
    return 100 + 2 * experts * (SCORE_DIGITS + 2)


def must_reorder(former: Sequence[int], newest: Sequence[int]) -> bool:
    """Returns whether experts are to be ordered anew (section 3.5 of the paper).

    That is where the share of tokens of at least 25 % of the experts differs by at least 10 % from
    what it was when they were ordered last. The first scores always are a reason.
    """
    all_former, all_newest = sum(former), sum(newest)
    if not all_newest:
        return False
    if not all_former or len(former) != len(newest):
        return True
    changed = 0
    for one, other in zip(former, newest, strict=True):
        before, after = one * all_newest, other * all_former
        changed += before != after and 10 * abs(after - before) >= before
    return 4 * changed >= len(newest)


def _averaged(former: Sequence[int], counts: Sequence[int], decay: float) -> tuple[int, ...]:
    stays = round(decay * _DECAY_PARTS)
    counts = [count * _AVERAGED_PARTS for count in counts]
    if len(former) != len(counts):
        return tuple(counts)
    return tuple(
        (stays * before + (_DECAY_PARTS - stays) * count) // _DECAY_PARTS
        for before, count in zip(former, counts, strict=True)
    )


def _within_bits(scores: tuple[int, ...]) -> tuple[int, ...]:
    """Returns scores that have no more digits than there is room for."""
    excess = max(max(scores, default=0).bit_length() - _SCORE_BITS, 0)
    return tuple(score >> excess for score in scores)
