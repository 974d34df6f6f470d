# SPDX-License-Identifier: Apache-2.0
"""Of old events so much is kept that the account of a job stays the same."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.accounting.account import account_of
from megatron_moevement.policy.accounting.compaction import MOST_STEPS, compacted
from megatron_moevement.policy.accounting.event import PERIODIC, EventName, EventRecord
from megatron_moevement.policy.accounting.parts import Part
from megatron_moevement.policy.recovery.lifecycle import Phase


def steps(first, number, at, *, each=8.0, stall=1.0, interval=1, **fields):
    """Returns events of steps that follow each other, with a second between two of them."""
    for start in range(first, first + number, interval):
        count = min(interval, first + number - start)
        began = at + (start - first) * (each + 1)
        ended = began + count * each + count - 1
        yield EventRecord(
            *(ended + 0.5, 0, 1, 0, start + count - 1, EventName.ITERATION),
            {
                "steps": count,
                "began_s": began,
                "ended_s": ended,
                "duration_s": count * each,
                "stall_s": count * stall,
                **fields,
            },
        )


def event(name, time, **fields):
    return EventRecord(time, 0, 1, 0, 0, name, fields)


def history(*, interval=1):
    yield event(EventName.PROCESS_START, 1000.0)
    yield event(EventName.PHASE, 1001.0, phase=Phase.TRAINING.value)
    yield from steps(1, 100, 1001.0, interval=interval)
    yield event(EventName.PHASE, 1901.0, phase=Phase.PAUSED.value)
    yield event(EventName.EVALUATION, 1905.0, duration_s=3.0)
    yield event(EventName.PHASE, 1906.0, phase=Phase.TRAINING.value)
    yield from steps(101, 50, 1907.0, interval=interval)
    yield event(EventName.PHASE, 2400.0, phase=Phase.ENDING.value)
    yield event(EventName.PROCESS_END, 2410.0, child=1, code=0)


def account(records):
    return account_of({"only": functools.partial(list, list(records))})


def test_a_history_of_sums_has_the_account_of_its_steps():
    whole = account(history())
    assert whole.parts_us[Part.USEFUL] == 150 * 7_000_000
    assert whole.parts_us[Part.STALL] == 150 * 1_000_000
    assert whole.parts_us[Part.BETWEEN] > 148 * 1_000_000
    for records in (
        history(interval=7),
        compacted(history()),
        compacted(history(interval=7)),
        compacted(compacted(history(interval=3))),
    ):
        other = account(records)
        assert other.parts_us == whole.parts_us
        assert other.steps == whole.steps == 150


def test_between_two_happenings_one_event_is_left_and_none_is_too_long():
    assert [one.fields.get("steps") for one in compacted(history())] == [
        *(None, None, 100, None, None, None, 50, None, None)
    ]
    long = list(compacted(steps(1, 2 * MOST_STEPS + 1, 0.0)))
    assert [one.fields["steps"] for one in long] == [MOST_STEPS, MOST_STEPS, 1]


def test_the_loss_of_the_last_step_is_kept():
    (only,) = compacted(steps(1, 8, 0.0, interval=4, loss=2.5, losses=[4.0, 3.5, 3.0, 2.5]))
    assert only.fields["loss"] == 2.5
    assert "losses" not in only.fields


@pytest.mark.parametrize("change", [{"generation": 1}, {"logical_rank": 1}, {"iteration": 9}])
def test_steps_that_do_not_follow_each_other_stay_apart(change):
    first, second = steps(1, 2, 0.0)
    import dataclasses  # noqa: PLC0415

    assert len(list(compacted([first, second]))) == 1
    assert len(list(compacted([first, dataclasses.replace(second, **change)]))) == 2


@given(st.lists(st.sampled_from(EventName), max_size=30))
def test_what_happened_is_kept_and_what_recurs_is_not(names):
    records = [event(name, float(at)) for at, name in enumerate(names)]
    kept = [one.event for one in compacted(records) if one.event is not EventName.ITERATION]
    assert kept == [name for name in names if name not in PERIODIC]
