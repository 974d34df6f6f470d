# SPDX-License-Identifier: Apache-2.0
"""Roll-forward: how far the ranks of a stage got, and who catches up with finished gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_moevement.policy.facts.facts import Condition, InconsistentFactsError, ProcessFacts
from megatron_moevement.policy.recovery.plan import RollForward
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import (
    Timetable,
    TwoSchedulesError,
    newest_timetable,
)

_LOST = {Condition.TORN, Condition.ABSENT}


@dataclasses.dataclass(frozen=True)
class Progress:
    """The state that ranks which step together can go on from, once the laggards rolled forward.

    Attributes:
        step: k of that S_k.
        window: the window that is still being converted; None when the state is dense.
        roll_forward: the ranks that apply step k first.
    """

    step: int
    window: Window | None
    roll_forward: tuple[RollForward, ...] = ()

    def serves(self, window: Window) -> bool:
        """Returns whether a replay from `window` may start here instead of at its first slot."""
        return self.step >= window.start and self.window in {None, window}


def newest_committed(processes: Sequence[ProcessFacts]) -> int | None:
    """Returns the target T: the newest step that any survivor has committed.

    Never an older one: a rank that committed T can't go back, and all others can follow it. What
    new processes find counts only where nobody else knows of a step: a dead process may have
    committed one more than those that live, which have given up its gradients since.
    """
    knowing = [facts for facts in processes if facts.committed is not None]
    return max(
        (facts.committed for facts in lasting(knowing) if facts.committed is not None), default=None
    )


def lasting(processes: Sequence[ProcessFacts]) -> Sequence[ProcessFacts]:
    """Returns those of some processes that were there before; all where every one is new."""
    return [facts for facts in processes if not facts.is_new] or processes


def agreed_timetable(processes: Sequence[ProcessFacts]) -> Timetable | None:
    """Returns the schedules that the job has agreed on, as far as anybody knows of any.

    A rank that has committed the target knows all of them: it wrote them down with the step. What a
    dead process knew beyond those that live was never in force, and is decided again.

    Raises:
        InconsistentFactsError: two schedules have one version.
    """
    knowing = [facts for facts in processes if facts.timetable is not None]
    there = lasting(knowing)
    newest = max((facts.committed or 0 for facts in there), default=0)
    known = [facts.timetable for facts in there if (facts.committed or 0) == newest]
    try:
        return newest_timetable(timetable for timetable in known if timetable is not None)
    except TwoSchedulesError as error:
        raise InconsistentFactsError(str(error)) from error


def check_nobody_is_ahead(processes: Sequence[ProcessFacts], target: int) -> None:
    """Checks that no live state is beyond the target: it could neither stay nor go back.

    Raises:
        InconsistentFactsError: one is; its journal did not know the step that it has.
    """
    for facts in processes:
        if facts.live.condition not in _LOST and facts.live.step > target:
            raise InconsistentFactsError(
                f"process {facts.process} holds step {facts.live.step}, and the newest step that "
                f"any journal has is {target}"
            )


def is_mid_replay(facts: ProcessFacts) -> bool:
    """Returns whether a rank's live state is one that a replay had reached, not training."""
    return facts.live.condition is Condition.PARTIAL or facts.live.step != facts.committed


def find_progress(members: Sequence[ProcessFacts], target: int) -> Progress | None:
    """Returns how far ranks that step together can go on from, None when a state is lost.

    Behind the barrier of a step every rank's gradients are complete, so with the newest of these
    ranks at k all others are at k too, or at k - 1 with the gradients of k finished. Where a plan
    that sends them back to a window was cut, some have given their state up for a slot and others
    have not: together they have nothing to go on from.

    Args:
        members: the processes of stages that must replay the same steps, all of them.
        target: T.

    Raises:
        InconsistentFactsError: a rank that was training is behind and can't follow: the barrier
            was not kept.
    """
    if any(facts.live.condition in _LOST for facts in members):
        return None
    newest = max(facts.live.step for facts in members)
    if newest < target and not all(map(is_mid_replay, members)):
        newest = target
    behind = [facts for facts in members if facts.live.step < newest]
    stuck = [facts for facts in behind if not _can_follow(facts, newest)]
    for facts in stuck:
        if not is_mid_replay(facts):
            raise InconsistentFactsError(
                f"{facts.rank} holds step {facts.live.step} with finished gradients of step "
                f"{facts.live.finished} and can't follow to step {newest}"
            )
    windows = _open_windows(members, newest)
    if stuck or len(windows) > 1:
        return None
    ranks = [facts.rank for facts in behind if facts.rank is not None]
    rolling = tuple(RollForward(rank, newest) for rank in sorted(ranks))
    return Progress(newest, windows.pop(), rolling)


def _can_follow(facts: ProcessFacts, step: int) -> bool:
    return facts.live.step == step - 1 and facts.live.finished == step


def open_window(members: Sequence[ProcessFacts], step: int) -> Window | None:
    """Returns the window that some of these ranks, of equal progress, still convert at S_step."""
    return next(iter(_open_windows(members, step) - {None}), None)


def _open_windows(members: Sequence[ProcessFacts], step: int) -> set[Window | None]:
    """Returns the windows that members at S_step still convert, None for those that are dense.

    At the last slot some have loaded it and some have not; all have before the next step begins.
    """
    windows = {
        window if window is not None and window.last >= step else None
        for window in (facts.live.window for facts in members)
    }
    if len(windows) == 2 and all(window is None or window.last == step for window in windows):
        windows.discard(None)
    return windows
