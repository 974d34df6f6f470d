# SPDX-License-Identifier: Apache-2.0
"""The choice of W while a job trains: it grows when training stalls, and shrinks with slack.

W is the smallest whose largest slot is copied and sent within an iteration (`PathBandwidth`). A
larger one is taken at once when stalls say so, a smaller one after several windows in a row in
which it would have left a margin. A smaller W captures more in each step, which may take cores or
memory from training although nothing waits. Where cores are busy, CPU times give the cost of a
captured byte, else the iterations of a smaller W that turn out longer: the smallest W follows that
costs little more than the largest. Iterations differ by more than that from one window to the next,
the waits of passes for a core hardly: where both become longer, few windows are enough. Where a
smaller W stalls or costs in spite of the margin, the next try takes twice as many windows, and many
times as many where passes waited longer for a core. So inputs that stay the same end in one W.

Where links are too slow for any W, the largest is taken with as few slots as copies to the host
admit, so that steps without anything in their slots make up for those with more than their share.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum

from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.policy.window.bandwidth import PathBandwidth
from megatron_moevement.policy.window.packing import ORDER_TOLERANCE
from megatron_moevement.policy.window.timetable import Trial, WindowDecision

STALL_SHARE = 0.02
"""Of an iteration: training that waits longer is stalled."""
_GROWN_SHARE = 0.9
"""Of the budget, that slots of a larger W take at most."""
_SHRUNK_SHARE = 0.75
"""Of the budget, that slots of a smaller W take at most."""
_PATIENCE = 3
"""Windows with slack in a row, before the first try of a smaller W."""
COST_SHARE = 0.01
"""Of an iteration: so much longer a smaller W may make it than a larger one.

To replay n steps fewer is worth that where a process is lost every 100 n steps.
"""
_PATIENCE_AFTER = 2
"""Times as many before the next, where one stalled or made iterations longer."""
_PATIENCE_AFTER_DELAYS = 8
"""The same where passes waited longer for a core besides: that is certain, and hardly changes."""
_MOST_PATIENCE = 192
"""A machine may change: a smaller W is tried at last."""
_TRIAL = 3
"""Windows without stalls after which a smaller W is given up at the earliest."""
_LONGEST_TRIAL = 12
"""The same at the latest, where windows differ by more than what it costs."""
_ACCIDENTS = 1
"""Windows in a row with stalls that bandwidths don't explain, without consequence."""


class Reason(Enum):
    """Why W changes or stays."""

    FITS = "fits"
    STALLS = "stalls"
    SLACK = "slack"
    COSTS = "costs"
    NO_WINDOW_FITS = "no window fits"


@dataclasses.dataclass(frozen=True)
class WindowChoice:
    """What is chosen, and what the next choice depends on.

    Attributes:
        window: W from the next edge on.
        used: the slots that hold anything; None: as many as W has use for.
        reason: of the last choice.
        budget_bytes: that an iteration hides by the newest measurements.
        stalled_windows: in a row, without an explanation by bandwidths.
        slack_windows: in a row in which a smaller W would have fitted.
        smaller: the W that would have fitted in all of them.
        patience: windows with slack that a smaller W takes.
        calm_windows: without stalls, since W is in force.
        iterations_s: of the newest of these.
        delays_s: in these, of passes that wait for a core; empty: not known.
        contention_s: of the newest of these.
        trial: that the last change was; None: it was to a larger W, or the trial is over.
        reached: slots in use when it was chosen, or on the way to it, which may take several
            changes (`least_after`).
    """

    window: int
    used: int | None = None
    reason: Reason = Reason.FITS
    budget_bytes: int = 0
    stalled_windows: int = 0
    slack_windows: int = 0
    smaller: int = 1
    patience: int = _PATIENCE
    calm_windows: int = 0
    iterations_s: tuple[float, ...] = ()
    delays_s: tuple[float, ...] = ()
    contention_s: tuple[float, ...] = ()
    trial: Trial | None = None
    reached: int = 0

    @classmethod
    def under(
        cls,
        window: int,
        used: int | None,
        former: WindowChoice | None,
        decision: WindowDecision | None = None,
    ) -> WindowChoice:
        """Returns what the next choice depends on under the W in force.

        Args:
            used: of its slots, as of the attribute.
            former: the last choice; where this W is neither its own nor on the way to it, its
                patience alone counts.
            decision: that led to the W in force, where a restart has ended what was measured: a
                trial begins again.
        """
        if former is None and decision is not None:
            former = cls(**decision._asdict(), reason=_reason_of(decision))
        if former is None or (former.window, former.used) == (window, used):
            return former or cls(window, used)
        if former.used_slots < (used or window) < former.reached:
            return dataclasses.replace(former, reached=used or window)
        return cls(window, used, patience=former.patience)

    @property
    def decision(self) -> WindowDecision:
        """What outlasts a restart."""
        return WindowDecision(self.window, self.used, self.patience, self.reached, self.trial)

    @property
    def used_slots(self) -> int:
        """The slots of its windows that may hold anything."""
        return self.used or self.window

    def is_under_way(self, window: int, used: int | None) -> bool:
        """Returns whether another W is in force, on the way to this one."""
        return (self.window, self.used) != (window, used)

    def after(self, measured: Measured, slots: Mapping[int, int], replicas: int) -> WindowChoice:
        """Returns the choice after another window.

        Args:
            measured: of the worst rank.
            slots: for each W that the job may come to the bytes of the largest slot of the worst
                rank.
            replicas: r.
        """
        path = path_of(measured, replicas)
        if path is None or measured.iteration_s <= 0:
            return self
        iteration = timedelta(seconds=measured.iteration_s)
        budget_bytes = path.slot_budget_bytes(iteration)
        now = dataclasses.replace(self, budget_bytes=budget_bytes, reason=Reason.FITS)
        if measured.stall_s <= STALL_SHARE * measured.iteration_s:
            return _after_none(now, slots, measured)
        if min(slots.values()) > budget_bytes:
            to_host = dataclasses.replace(path, replicas=0)
            spread = _spread(now, slots, to_host.slot_budget_bytes(iteration))
            if spread is not None:
                return spread
        return _after_stalls(now, slots)


def ends_trial(standing: WindowDecision | None, newest: WindowDecision | None) -> bool:
    """Returns whether a trial is over whose W stays: agreed on, it does not begin again.

    Args:
        standing: that led to the W in force.
        newest: what has become of it.
    """
    if standing is None or standing.trial is None or newest is None:
        return False
    return newest.trial is None and newest.window == standing.window


def _reason_of(decision: WindowDecision) -> Reason:
    """Returns what a W that it is still on the way to was chosen for."""
    if decision.used is not None:
        return Reason.NO_WINDOW_FITS
    return Reason.FITS if decision.trial is None else Reason.SLACK


def _spread(
    choice: WindowChoice, slots: Mapping[int, int], to_host_bytes: int
) -> WindowChoice | None:
    """Returns the largest W with as few slots as an iteration hides the copies of to the host.

    None: these are too slow, too, so that many small slots are best.
    """
    longest, hidden = max(slots), {w for w, size in slots.items() if size <= to_host_bytes}
    if choice.window == longest and choice.used in hidden:
        return dataclasses.replace(choice, reason=Reason.NO_WINDOW_FITS, slack_windows=0, smaller=1)
    used = _smallest(slots, _GROWN_SHARE * to_host_bytes)
    if used is None or used >= longest:
        return None
    budget_bytes, patience = choice.budget_bytes, _next_patience(choice)
    return WindowChoice(
        longest,
        used,
        Reason.NO_WINDOW_FITS,
        budget_bytes,
        patience=patience,
        reached=choice.used_slots,
    )


def path_of(measured: Measured, replicas: int) -> PathBandwidth | None:
    """Returns the path that slots take; None where nothing was captured.

    Args:
        replicas: r.
    """
    to_host, to_holder = measured.to_host_bytes_per_s, measured.to_holder_bytes_per_s
    if to_host is None or to_host <= 0:
        return None
    if to_holder is None or to_holder <= 0 or not replicas:
        return PathBandwidth(to_host, to_host, replicas=0)
    return PathBandwidth(to_host, to_holder * replicas, replicas)


def _after_stalls(choice: WindowChoice, slots: Mapping[int, int]) -> WindowChoice:
    window, stalled = choice.window, choice.stalled_windows + 1
    fitting = _smallest(slots, _GROWN_SHARE * choice.budget_bytes)
    wanted = _least_stalled(slots) if fitting is None else fitting
    if fitting is not None and wanted <= window and stalled > _ACCIDENTS:
        wanted = _next_smaller_slot(slots, window)
    fits = min(slots.values()) <= choice.budget_bytes
    reason = Reason.STALLS if fits else Reason.NO_WINDOW_FITS
    if wanted <= window:
        return dataclasses.replace(
            choice, reason=reason, stalled_windows=stalled, slack_windows=0, smaller=1
        )
    patience = _next_patience(choice)
    return WindowChoice(wanted, None, reason, choice.budget_bytes, patience=patience)


def _after_none(choice: WindowChoice, slots: Mapping[int, int], measured: Measured) -> WindowChoice:
    choice = dataclasses.replace(
        choice,
        stalled_windows=0,
        calm_windows=choice.calm_windows + 1,
        iterations_s=(*choice.iterations_s, measured.iteration_s)[-_LONGEST_TRIAL:],
        delays_s=(*choice.delays_s, *_known(measured.delay_s))[-_LONGEST_TRIAL:],
        contention_s=(*choice.contention_s, measured.contention_s)[-_TRIAL:],
    )
    if choice.calm_windows > _LONGEST_TRIAL and choice.trial is not None:
        choice = dataclasses.replace(choice, trial=None, patience=_PATIENCE)  # it costs little
    budget_bytes = choice.budget_bytes
    cheap = _cheap(choice, slots)
    if cheap is not None:
        is_certain = _is_costly(choice) and _are_delayed(choice)
        patience = _next_patience(choice, _PATIENCE_AFTER_DELAYS if is_certain else _PATIENCE_AFTER)
        return WindowChoice(cheap, None, Reason.COSTS, budget_bytes, patience=patience)
    byte_s = max(choice.contention_s) / max(_slot_bytes(choice, slots), 1)
    cheap_bytes = _cheap_bytes(choice, slots, byte_s, _SHRUNK_SHARE)
    fitting = _smallest(slots, min(_SHRUNK_SHARE * budget_bytes, cheap_bytes))
    if fitting is None or fitting >= choice.window:
        return dataclasses.replace(choice, slack_windows=0, smaller=1)
    smaller, slack = max(choice.smaller, fitting), choice.slack_windows + 1
    if slack < choice.patience or _is_costly(choice) is None:
        return dataclasses.replace(choice, slack_windows=slack, smaller=smaller)
    tried = Trial(
        choice.window,
        _slot_bytes(choice, slots),
        _middle(choice.iterations_s),
        _range(choice.iterations_s),
        _middle(choice.delays_s) if choice.delays_s else None,
    )
    return WindowChoice(
        smaller,
        None,
        Reason.SLACK,
        budget_bytes,
        patience=choice.patience,
        trial=tried,
        reached=choice.used_slots,
    )


def _cheap(choice: WindowChoice, slots: Mapping[int, int]) -> int | None:
    """Returns the W that is to follow one that costs too much; None: it does not."""
    if choice.calm_windows < _TRIAL:
        return None
    if choice.trial is not None and _is_costly(choice):
        more_bytes = _slot_bytes(choice, slots) - choice.trial.slot_bytes
        if more_bytes <= 0:
            return choice.trial.former
        more_s = _middle(choice.iterations_s) - choice.trial.iteration_s
        return _smallest(slots, _cheap_bytes(choice, slots, more_s / more_bytes))
    if choice.used is not None:
        return None  # links are too slow for the slots of any W
    # The first windows of a W touch memory for the first time: the least counts.
    byte_s = min(choice.contention_s) / max(_slot_bytes(choice, slots), 1)
    if _slot_bytes(choice, slots) <= _cheap_bytes(choice, slots, byte_s):
        return None
    return _smallest(slots, _cheap_bytes(choice, slots, byte_s, _GROWN_SHARE))


def _is_costly(choice: WindowChoice) -> bool | None:
    """Returns whether a trial makes iterations too long; None: windows differ too much to tell."""
    trial, windows = choice.trial, choice.calm_windows
    if trial is None:
        return False
    over_s = _middle(choice.iterations_s) - (1 + COST_SHARE) * trial.iteration_s
    if over_s <= 0:
        return False
    spread_s = max(_range(choice.iterations_s), trial.spread_s)
    is_certain = over_s > spread_s or _are_delayed(choice)
    return True if is_certain or windows == _LONGEST_TRIAL else None


def _are_delayed(choice: WindowChoice) -> bool:
    """Returns whether passes of a trial are known to wait longer for cores, and not by little."""
    trial = choice.trial
    if trial is None or trial.delay_s is None or not choice.delays_s:
        return False
    return _middle(choice.delays_s) - trial.delay_s > COST_SHARE * trial.iteration_s


def _known(value_s: float | None) -> tuple[float, ...]:
    return () if value_s is None else (value_s,)


def _middle(times_s: tuple[float, ...]) -> float:
    """Returns the median: neither a window that was disturbed nor one that was lucky moves it."""
    return statistics.median(times_s)


def _range(times_s: tuple[float, ...]) -> float:
    return max(times_s) - min(times_s)


def _cheap_bytes(
    choice: WindowChoice, slots: Mapping[int, int], byte_s: float, share: float = 1.0
) -> float:
    """Returns the size of slots that lengthen iterations little more than the smallest would.

    Args:
        byte_s: that a captured byte lengthens an iteration by.
        share: of what is little.
    """
    if byte_s <= 0:
        return math.inf
    iteration_s = _middle(choice.iterations_s)
    if choice.trial is not None:
        iteration_s = min(iteration_s, choice.trial.iteration_s)
    return min(slots.values()) + share * COST_SHARE * iteration_s / byte_s


def _slot_bytes(choice: WindowChoice, slots: Mapping[int, int]) -> int:
    """Returns the size of the largest slot; where some are empty, their mean."""
    if choice.used is None:
        return slots[choice.window]
    return slots[choice.used] * choice.used // choice.window


def _next_patience(choice: WindowChoice, times: int = _PATIENCE_AFTER) -> int:
    """Returns the patience after a change to a larger W: so many times where a trial failed."""
    return choice.patience if choice.trial is None else min(choice.patience * times, _MOST_PATIENCE)


def _smallest(slots: Mapping[int, int], most_bytes: float) -> int | None:
    """Returns the smallest W with slots of so many bytes at most."""
    return min((window for window, size in slots.items() if size <= most_bytes), default=None)


def _least_stalled(slots: Mapping[int, int]) -> int:
    """Returns the smallest W that comes near to the least stall."""
    return min(
        w for w, size in slots.items() if size <= min(slots.values()) * (1 + ORDER_TOLERANCE)
    )


def _next_smaller_slot(slots: Mapping[int, int], window: int) -> int:
    """Returns the next larger W with clearly smaller slots, or the same W."""
    most_bytes = slots[window] / (1 + ORDER_TOLERANCE)
    larger = (w for w, size in slots.items() if w > window and size < most_bytes)
    return min(larger, default=window)
