# SPDX-License-Identifier: Apache-2.0
"""How a job stands follows from its events, whatever happens to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.outcome.metrics import Metric
from megatron_moevement.policy.outcome.standing import Standing
from megatron_moevement.policy.recovery.lifecycle import Phase


def event(time, name, iteration=0, *, rank=0, generation=0, **fields):
    return EventRecord(1000.0 + time, rank, 1, generation, iteration, name, fields)


def launched(time, launch="a"):
    return event(time, EventName.LAUNCHED, rank=-1, launch=launch, started_s=999.0 + time)


def steps(time, first, last, *, rank=0, generation=0, **fields):
    """Returns the event of steps of a second, of which 0.1 s are stall."""
    number = last - first + 1
    return event(
        *(time, EventName.ITERATION, last),
        rank=rank,
        generation=generation,
        steps=number,
        began_s=1000.0 + time - number,
        ended_s=1000.0 + time,
        duration_s=float(number),
        stall_s=0.1 * number,
        **fields,
    )


def recovered(time, rank, wait_s, generation=1):
    return event(
        *(time, EventName.RECOVERED, 12),
        rank=rank,
        generation=generation,
        verdict="LOCALIZED",
        scope=[1],
        guarantee="EXACT",
        replayed_steps=0,
        replay_proof=None,
        breakdown_s={"detect": 0.5, "replay": 4.0 - wait_s, "wait": wait_s},
        owed_copies=0,
        moved_copies=0,
    )


def figures(*records, at=100.0):
    standing = Standing()
    for record in records:
        standing.take(record)
    found = {}
    for metric, value, label in standing.figures(1000.0 + at):
        name = metric.value.name
        if label:
            found.setdefault(name, {})[label] = value
        else:
            found[name] = value
    return found


def test_nothing_is_known_before_the_first_event():
    assert figures() == {}


def test_the_newest_step_and_what_it_took():
    found = figures(
        launched(0),
        steps(10, 1, 10, loss=2.5, host_bytes=100),
        steps(11, 1, 10, rank=1, host_bytes=300, captured_bytes=60, copy_s=2.0),
        steps(12, 11, 12, rank=1, host_bytes=200, captured_bytes=20, copy_s=2.0),
        steps(20, 11, 20, loss="nan", captured_bytes=60, copy_s=3.0, host_bytes=100),
    )
    assert (found["committed_step"], found["last_step_timestamp_seconds"]) == (20, 1020.0)
    assert found["iteration_seconds"] == pytest.approx(1.0)
    assert found["stall_seconds"] == pytest.approx(0.1)
    assert (found["host_bytes"], found["host_bytes_max"]) == (300, 200)
    assert found["capture_bytes_per_second"] == 10.0
    assert "replication_bytes_per_second" not in found
    assert found["lm_loss"] != found["lm_loss"]
    assert (found["ranks"], found["generation"], found["launches"], found["faults"]) == (2, 0, 1, 0)


def test_the_bandwidth_to_a_holder_is_that_of_the_slowest_rank():
    found = figures(
        steps(1, 1, 1, replicated_bytes=100, send_s={"1": 1.0, "2": 1.0}),
        steps(1, 1, 1, rank=1, replicated_bytes=100, send_s={"0": 0.5}),
    )
    assert found["replication_bytes_per_second"] == 50.0


def test_the_share_of_useful_time_leaves_out_what_is_trained_again():
    first = [launched(0), steps(10, 1, 10), steps(20, 11, 20)]
    assert figures(*first, at=99.0)["effective_training_time_ratio"] == pytest.approx(18 / 100)
    again = [*first, steps(40, 16, 20, generation=1)]
    assert figures(*again, at=99.0)["effective_training_time_ratio"] == pytest.approx(18 / 100)
    back = [*first, steps(40, 4, 5, generation=1)]
    assert figures(*back, at=99.0)["effective_training_time_ratio"] == pytest.approx(4.5 / 100)
    assert figures(*back)["committed_step"] == 5


def test_what_a_former_generation_recorded_late_is_no_step_of_this_one():
    found = figures(
        *(steps(10, 1, 10), steps(25, 8, 9, generation=1, loss=2.0)),
        steps(30, 11, 12, loss=1.0),
    )
    assert (found["committed_step"], found["lm_loss"]) == (9, 2.0)


def test_protection_is_that_of_the_newest_window_and_the_newest_change():
    told = {"level": "full", "copies": 2, "wanted": 2, "spares": 1}
    edge = {"start": 8, "size": 4, "lag": 2}
    found = figures(
        event(1, EventName.PROTECTION, **told),
        event(2, EventName.WINDOW_PERSISTED, **edge, copies=1),
        event(
            2, EventName.PROTECTION, **(told | {"level": "reduced", "copies": 1, "spares": None})
        ),
        event(3, EventName.CHECKPOINT_SAVED, 7, duration_s=1.0),
    )
    assert found["protection_level"] == {"full": 0, "reduced": 1, "no copies": 0}
    assert (found["copies"], found["copies_wanted"]) == (1, 2)
    assert (found["persisted_step"], found["window_steps"], found["lag_steps"]) == (11, 4, 2)
    assert found["checkpoint_step"] == 7
    assert "spares" not in found


def test_a_restart_is_a_fault_and_its_recovery_has_parts():
    before = [launched(0), steps(10, 1, 10), steps(10, 1, 10, rank=1)]
    noticed = [*before, event(20, EventName.FAULT_DETECTED, generation=1)]
    found = figures(*noticed)
    assert (found["faults"], found["recovering"], found["ranks"], found["generation"]) == (
        1,
        1,
        1,
        1,
    )
    ended = [
        *noticed,
        recovered(25, 0, 3.0),
        recovered(25, 1, 0.0),
        event(26, EventName.PHASE, generation=1, phase=Phase.TRAINING.value),
    ]
    found = figures(*ended)
    assert found["recovery_seconds"] == {"detect": 0.5, "replay": 4.0, "wait": 0.0}
    assert found["recoveries"]["LOCALIZED"] == 1
    assert found["recoveries"]["ROLLBACK"] == 0
    assert (found["recovering"], found["ranks"]) == (0, 2)
    found = figures(*ended, recovered(40, 0, 1.0, generation=2))
    assert found["recovery_seconds"] == {"detect": 0.5, "replay": 3.0, "wait": 1.0}
    assert found["recoveries"]["LOCALIZED"] == 2


def test_a_launch_begins_with_no_ranks_and_counts_as_a_fault_where_the_one_before_failed():
    first = [
        launched(0),
        launched(0),
        steps(10, 1, 10),
        event(11, EventName.FAULT_DETECTED, generation=1),
    ]
    found = figures(*first, launched(20, "b"))
    assert (found["launches"], found["faults"], found["generation"], found["ranks"]) == (2, 2, 0, 0)
    assert "host_bytes" not in found
    ended = event(12, EventName.PROCESS_END, rank=-1, code=0)
    assert figures(*first, ended, launched(20, "b"))["faults"] == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 2)), max_size=30))
def test_the_share_of_useful_time_is_one_at_most(trained):
    records = [
        steps(float(at), first, first + rank, generation=rank)
        for at, (first, rank, _) in enumerate(trained)
    ]
    assert 0 <= figures(*records, at=40.0).get(Metric.ETTR.value.name, 0.0) <= 1
