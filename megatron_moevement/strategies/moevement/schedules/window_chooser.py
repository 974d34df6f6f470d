# SPDX-License-Identifier: Apache-2.0
"""The chooser of W: brings what ranks have measured to the policy, on the rank that proposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.policy.watching.window_choice import Reason, WindowChoice
from megatron_moevement.runtime.observation.events import EventName, Events


class WindowChooser:
    """Of one generation.

    The training thread notes measurements; the thread that makes schedules chooses.
    """

    def __init__(
        self,
        slots: Callable[[], Mapping[int, int]],
        replicas: int,
        events: Events,
        say: Callable[[str], None],
    ) -> None:
        """Has chosen nothing.

        Args:
            slots: returns for each W that there is room for the bytes of the largest slot; called
                once, by the thread that makes schedules.
            replicas: copies of each slot.
            events: gets every change with the numbers behind it.
            say: tells the user, on one rank.
        """
        self._make_slots = slots
        self._slots: Mapping[int, int] | None = None
        self._replicas = replicas
        self._events = events
        self._say = say
        self._choice: WindowChoice | None = None
        self._is_told = False
        self._noted: tuple[int, int, Measured] | None = None

    def note(self, step: int, window: int, measured: Measured) -> None:
        """Notes what the worst rank has measured under a W in force."""
        self._noted = (step, window, measured)

    def forget(self) -> None:
        """Forgets what was noted: W is about to change."""
        self._noted = None

    @property
    def has_news(self) -> bool:
        """Whether something was noted since the last choice."""
        return self._noted is not None

    def choose(self) -> int | None:
        """Returns the W that is to follow; None where it stays."""
        noted, self._noted = self._noted, None
        if noted is None:
            return None
        step, window, measured = noted
        if self._slots is None:
            self._slots = self._make_slots()
        former = self._choice
        if former is None or former.window != window:  # another one has come into force
            former = WindowChoice(window)
        self._choice = choice = former.after(measured, self._slots, self._replicas)
        if choice.reason is Reason.NO_WINDOW_FITS and not self._is_told:
            self._is_told = True
            self._say(_too_slow(choice, measured, self._slots))
        if choice.window == window:
            return None
        self._tell(step, window, choice, measured, self._slots)
        return choice.window

    def _tell(
        self,
        step: int,
        former: int,
        choice: WindowChoice,
        measured: Measured,
        slots: Mapping[int, int],
    ) -> None:
        self._events.emit(
            EventName.WINDOW_CHOSEN,
            step,
            former=former,
            window=choice.window,
            reason=choice.reason.value,
            budget_bytes=choice.budget_bytes,
            former_slot_bytes=slots[former],
            slot_bytes=slots[choice.window],
            **dataclasses.asdict(measured),
        )
        self._say(
            f"step {step}: W = {choice.window} is proposed instead of {former} "
            f"({choice.reason.value}): {_numbers(choice, measured)}; the largest slot takes "
            f"{slots[choice.window] / 1e6:.3g} MB instead of {slots[former] / 1e6:.3g}"
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
    return (
        f"an iteration of {measured.iteration_s:.3g} s, with stalls of {measured.stall_s:.3g} s, "
        f"hides {choice.budget_bytes / 1e6:.3g} MB at {' and '.join(rates)}"
    )


def _too_slow(choice: WindowChoice, measured: Measured, slots: Mapping[int, int]) -> str:
    return (
        f"no W up to {max(slots)} hides its slots behind an iteration: the smallest of "
        f"{min(slots.values()) / 1e6:.3g} MB is too large, {_numbers(choice, measured)}; training "
        "waits for the rest: lower --moevement-replicas, or use a faster "
        "--moevement-replication-interface"
    )
