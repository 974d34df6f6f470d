# SPDX-License-Identifier: Apache-2.0
"""The chooser of W: brings what ranks have measured to the policy, on the rank that proposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.policy.watching.schedule_maker import Noted, SlotSizes
from megatron_moevement.policy.watching.window_choice import Reason, WindowChoice
from megatron_moevement.policy.window.timetable import WindowDecision
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.observation.notices import Notices


class WindowChooser:
    """Of one generation.

    The training thread notes measurements; the thread that makes schedules chooses.
    """

    def __init__(
        self,
        sizes: Callable[[], Mapping[int, SlotSizes]],
        replicas: int,
        events: Events,
        notices: Notices,
    ) -> None:
        """Has chosen nothing.

        Args:
            sizes: returns what slots take for each W that there is room for; called once, by the
                thread that makes schedules.
            replicas: copies of each slot.
            events: gets every change with the numbers behind it.
            notices: lines for the user, printed on one rank.
        """
        self._make_sizes = sizes
        self._sizes: Mapping[int, SlotSizes] | None = None
        self._replicas = replicas
        self._events = events
        self._notices = notices
        self._choice: WindowChoice | None = None
        self._is_told = False
        self._noted: Noted | None = None

    def note(self, news: Noted) -> None:
        """Notes what the worst rank has measured."""
        self._noted = news

    def forget(self) -> None:
        """Forgets what was noted: W is about to change."""
        self._noted = None

    @property
    def has_news(self) -> bool:
        """Whether something was noted since the last choice."""
        return self._noted is not None

    def decision(self, standing: WindowDecision | None) -> WindowDecision | None:
        """Returns what led to the W that was chosen last; None: it is the first one.

        Args:
            standing: that led to the W in force: it holds where nothing was chosen since a restart.
        """
        return standing if self._choice is None else self._choice.decision

    def choose(
        self, window: int, used: int | None, standing: WindowDecision | None = None
    ) -> tuple[int, int | None]:
        """Returns the W that is to follow, and how many of its slots hold anything.

        Args:
            window: in force.
            used: of its slots, as they are returned; None: as many as W has use for.
            standing: that led to it, maybe in a launch with other limits of W.
        """
        noted, self._noted = self._noted, None
        if noted is None:
            return window, used
        if self._sizes is None:
            self._sizes = self._make_sizes()
        largest = {each: size.largest_bytes for each, size in self._sizes.items()}
        if standing is not None and not standing.is_among(largest):
            standing = WindowDecision(window, used, standing.patience, reached=0)
        former = WindowChoice.under(window, used, self._choice, standing)
        if not former.is_under_way(window, used):
            former = former.after(noted.measured, largest, self._replicas)
        self._choice = choice = former
        if choice.reason is Reason.NO_WINDOW_FITS and not self._is_told:
            self._is_told = True
            self._notices.warn(_too_slow(choice, noted.measured, self._sizes))
        if (choice.window, choice.used) != (window, used):
            self._tell(noted, choice, largest.get(used or window, largest[window]), largest)
        return choice.window, choice.used

    def _tell(
        self, noted: Noted, choice: WindowChoice, former_bytes: int, largest: Mapping[int, int]
    ) -> None:
        slot_bytes = largest[choice.used or choice.window]
        self._events.emit(
            EventName.WINDOW_CHOSEN,
            noted.step,
            former=noted.window,
            window=choice.window,
            used=choice.used,
            reason=choice.reason.value,
            budget_bytes=choice.budget_bytes,
            former_slot_bytes=former_bytes,
            slot_bytes=slot_bytes,
            **dataclasses.asdict(noted.measured),
        )
        empty = "" if choice.used is None else f", {choice.window - choice.used} of them empty,"
        self._notices.say(
            f"step {noted.step}: W = {choice.window}{empty} is proposed instead of {noted.window} "
            f"({choice.reason.value}): {_numbers(choice, noted.measured)}; the largest slot takes "
            f"{slot_bytes / 1e6:.3g} MB instead of {former_bytes / 1e6:.3g}"
        )


def _numbers(choice: WindowChoice, measured: Measured) -> str:
    rates = [
        f"{rate / 1e6:.3g} MB/s to the {where}"
        for rate, where in (
            (measured.to_host_bytes_per_s, "host"),
            (measured.to_holder_bytes_per_s, "slowest holder"),
        )
        if rate is not None
    ]
    contention = ""
    if measured.contention_s:
        contention = f" and {measured.contention_s:.3g} s that threads beside training took"
    return (
        f"an iteration of {measured.iteration_s:.3g} s, with stalls of {measured.stall_s:.3g} s"
        f"{contention}, hides {choice.budget_bytes / 1e6:.3g} MB at {' and '.join(rates)}"
    )


def _too_slow(choice: WindowChoice, measured: Measured, sizes: Mapping[int, SlotSizes]) -> str:
    smallest = min(size.largest_bytes for size in sizes.values())
    told = (
        f"no W up to {max(sizes)} hides its slots behind an iteration: the smallest of "
        f"{smallest / 1e6:.3g} MB is too large, {_numbers(choice, measured)}"
    )
    advice = "lower --moevement-replicas, or use a faster --moevement-replication-interface"
    if choice.used is None:
        return f"{told}; training waits for the rest: {advice}"
    window_bytes = sizes[choice.used].window_bytes
    iterations = -(-window_bytes // max(choice.budget_bytes, 1))
    told += (
        f"; from now on {choice.used} of {choice.window} steps are captured, "
        f"{window_bytes / 1e6:.3g} MB in all, as much as {iterations} iterations hide"
    )
    if iterations <= choice.window:
        return told
    return (
        f"{told}; training waits for the rest: give --moevement-max-window {iterations}, {advice}"
    )
