# SPDX-License-Identifier: Apache-2.0
"""What a job of the fault cover must show of the change of its window schedule."""

from __future__ import annotations

from megatron_moevement.policy.facts.facts_document import FACTS, load_facts
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import newest_timetable
from megatron_moevement.runtime.observation.events import EventName, kept_documents
from tests.harness.fault_cover import TRAIN_ITERS, Row
from tests.harness.interruption import Run
from tests.harness.planned_change import Moment
from tests.harness.restarted_run import events_of


def replayed_window(run: Run, generation: int, start: int) -> Window:
    """Returns the window that begins with a step, as the recovery of a generation read it."""
    paths = kept_documents(run.events, FACTS)
    documents = [load_facts(path.read_text(encoding="utf-8"), path.name) for path in paths]
    (facts,) = [one for one in documents if one.generation == generation]
    timetables = [one.timetable for one in facts.processes if one.timetable is not None]
    timetable = newest_timetable(timetables)
    assert timetable is not None
    window = timetable.window_of(start)
    assert window.start == start
    return window


def check_change(row: Row, run: Run) -> None:
    """Checks that the fault happened at its moment of the change, which came in force in the end.

    Raises:
        AssertionError: it did not, so that the job shows nothing of changes.
    """
    planned, schedules = row.planned, events_of(run, EventName.SCHEDULE, generation=None)
    if planned is None:
        assert schedules == []
        return
    _check_moment(row, run)
    assert schedules, "the schedule did not change"
    newest = max(event.fields["version"] for event in schedules)
    last = [event for event in schedules if event.fields["version"] == newest]
    (entry,) = {
        (event.fields["first_step"], event.fields["window"], event.fields["digest"])
        for event in last
        if event.generation == max(event.generation for event in last)
    }
    first_step, window, _ = entry
    assert window == planned.new_window
    assert first_step >= planned.edge
    captured = {
        (event.fields["start"], event.fields["size"])
        for event in events_of(run, EventName.WINDOW_PERSISTED, generation=None)
    }
    assert any(start >= first_step and size == window for start, size in captured), (
        f"no window from step {first_step} on was persisted: {sorted(captured)} of {TRAIN_ITERS}"
    )
    assert all(size == planned.window for start, size in captured if start < first_step)


def _check_moment(row: Row, run: Run) -> None:
    """Checks what the ranks had agreed on when the fault struck."""
    planned, moment, generation = row.planned, Moment(row.moment), row.fault.generation
    assert planned is not None
    known = {
        (event.iteration, event.fields["first_step"])
        for event in events_of(run, EventName.SCHEDULE, generation=None)
        if event.generation <= generation
    }
    agreed = {(planned.agreed, planned.edge)}
    if not row.restarts:  # it went on, until it was killed from outside
        assert known <= agreed, known
    elif moment in {Moment.UNPROPOSED, Moment.PROPOSED}:
        assert known == set(), known
    elif moment is Moment.AGREED and _target(run, generation + 1) < row.step:
        assert known <= agreed, known  # who may have committed the step is gone
    else:
        assert known == agreed, known


def _target(run: Run, generation: int) -> int:
    """Returns the step that the recovery of a generation has led to."""
    (target,) = {plan.fields["target"] for plan in events_of(run, EventName.PLAN, generation)}
    return int(target)
