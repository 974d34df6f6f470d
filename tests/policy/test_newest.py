# SPDX-License-Identifier: Apache-2.0
"""What `moevement watch` shows is the newest, in whatever order files are read, and how often."""

import pytest

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


def shown(newest):
    return (
        *(newest.run_id, newest.launch, newest.generation, newest.step, newest.time_s),
        *(newest.step_fields, newest.protection, newest.window, newest.living()),
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
    assert newest.launch == f"launch-{last}"
    assert newest.step == 50
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
    assert 1.0 < read(sorted(RUN.records)).duration_s < 4.0
