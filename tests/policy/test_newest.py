# SPDX-License-Identifier: Apache-2.0
"""What `moevement watch` shows is the newest, in whatever order files are read, and how often."""

import pytest

from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.report.newest import Newest
from tests.harness.synthetic_run import Shape, SyntheticRun

RUN = SyntheticRun(Shape(layout=Layout(pp=2, dp=2), spares=2, steps=50, faults=4, seed=5))


def described(code):
    return f"ended with {code}"


def read(places, times=1):
    newest = Newest()
    for _ in range(times):
        for place in places:
            for record in RUN.records[place]:
                newest.take(str(place), record)
    return newest


def kept(latest):
    return [
        latest.events[kind].fields for kind in (EventName.PROTECTION, EventName.WINDOW_PERSISTED)
    ]


def shown(newest):
    return (
        *(newest.run_id, newest.latest.launch, newest.latest.generation, newest.latest.step),
        *(newest.time_s, newest.step_fields, *kept(newest.latest), newest.living()),
        [newest.loss_before(one, described) for one in newest.restarts],
        [one.restart.account() for one in newest.restarts],
    )


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("is_backwards", [False, True])
def test_order_and_repetition_do_not_matter(times, is_backwards):
    places = sorted(RUN.records, reverse=is_backwards)
    assert shown(read(places, times))[:9] == shown(read(sorted(RUN.records)))[:9]


def test_an_old_event_that_is_read_again_changes_nothing():
    newest = read(sorted(RUN.records))
    before = str(newest.living())
    place = (max(RUN.records)[0], 0)
    for record in RUN.records[place][:4]:
        newest.take(str(place), record)
    assert str(newest.living()) == before


def test_it_is_that_of_the_newest_launch():
    newest = read(sorted(RUN.records))
    last = max(launch for launch, _ in RUN.records)
    assert last > 0
    assert newest.latest.launch == f"launch-{last}"
    assert newest.latest.step == 50
    processes = newest.living()
    assert len(processes) == 6
    assert [one.code for one in processes].count(0) == 5  # one was lost after the launch
    assert {one.rank for one in processes} == {0, 1, 2, 3, -1}
    assert processes[-1].doing == "ending"


def test_each_restart_names_who_was_lost_and_how():
    newest = read(sorted(RUN.records))
    assert newest.restarts
    for watched in newest.restarts:
        (loss,) = watched.restart.losses.values()
        line = newest.loss_before(watched, described)
        assert line.startswith(f"rank {loss['rank']} on {loss['host']} ")
        assert "ended with " in line


def test_before_the_first_step_there_is_no_time_of_one():
    assert read([]).duration_s is None
    newest = Newest()
    for rank, took_s in enumerate((1.0, 5.0)):  # of one step the first that is read counts
        fields = {"duration_s": took_s}
        newest.take(str(rank), EventRecord(9.0, rank, 1, 0, 1, EventName.ITERATION, fields))
    assert newest.duration_s == 1.0
    assert 1.0 < read(sorted(RUN.records)).duration_s < 4.0


def test_steps_that_were_lost_are_not_the_newest():
    """After a rollback, and in a launch that goes on from an older state."""

    def records(launch, at_s, generation, *steps):
        common = (0, 1, generation)
        yield EventRecord(at_s, -1, 1, 0, 0, EventName.LAUNCHED, {"launch": launch, "process": 0})
        for step in steps:
            fields = {"duration_s": 1.0, "loss": float(step)}
            yield EventRecord(at_s + step, *common, step, EventName.ITERATION, fields)

    first = list(records("a", 100.0, 0, 1, 2, 9))
    rollback = list(records("a", 100.0, 1, 3, 4))
    relaunch = list(records("b", 200.0, 0, 3))
    for files, launch, generation, step in (
        ((first, rollback), "a", 1, 4),
        ((rollback, first), "a", 1, 4),
        ((first, rollback, relaunch), "b", 0, 3),
        ((relaunch, first, rollback), "b", 0, 3),
    ):
        newest = Newest()
        for name, file in enumerate(files):
            for record in file:
                newest.take(f"{launch}{name}", record)
        found = newest.latest
        assert (found.launch, found.generation, found.step) == (launch, generation, step)
        assert newest.step_fields == {"loss": float(step)}
