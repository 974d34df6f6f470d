# SPDX-License-Identifier: Apache-2.0
"""What the flags of protection mean."""

import dataclasses

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.retention import LAG, max_replayed_steps
from megatron_moevement.settings.fault_tolerance import (
    Chosen,
    FaultTolerance,
    ScheduleChange,
    check_fault_tolerance,
    parse_changes,
    parse_window,
)


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ("127.0.0.1", ["127.0.0.1"] * 4),
        ("ib{local_rank}", ["ib0", "ib1", "ib2", "ib3"]),
        ("ib0,ib1", ["ib0", "ib1", "ib0", "ib1"]),
        ("10.0.{local_rank}.7,node-a", ["10.0.0.7", "node-a", "10.0.2.7", "node-a"]),
    ],
)
def test_each_local_rank_has_an_interface(given, places):
    settings = FaultTolerance(moevement_replication_interface=given)
    own = [settings.of_process(local_rank) for local_rank in range(4)]
    assert [one.moevement_replication_interface for one in own] == places


@pytest.mark.parametrize("limit_bytes", [1, 3989695, 8 * 10**9 + 1])
def test_the_limit_of_host_memory_is_the_number_of_bytes_that_was_given(limit_bytes):
    settings = FaultTolerance(moevement_host_memory_limit_gb=limit_bytes / 1e9)
    assert settings.host_memory_limit_bytes == limit_bytes


def test_without_a_limit_there_is_none():
    assert FaultTolerance().host_memory_limit_bytes is None


def test_schedules_are_wanted_from_the_first_step_on():
    changes = parse_changes("20:3,50:5")
    assert changes == (ScheduleChange(20, 3), ScheduleChange(50, 5))
    settings = FaultTolerance(moevement_window=4, moevement_schedule_changes=changes)
    assert settings.changes == (ScheduleChange(0, 4), *changes)


@pytest.mark.parametrize("text", ["", "20", "20:0", "20:x", ":3", "-1:3", "20:3,", "20:3,20:4"])
def test_what_is_no_change_is_refused(text):
    with pytest.raises(ValueError, match=r"STEP:W|ascend"):
        parse_changes(text)


def test_the_limits_of_w_are_w_itself_unless_told():
    settings = FaultTolerance(moevement_window=4)
    assert (settings.min_window, settings.max_window) == (4, 4)
    resolved = settings.resolved()
    assert (resolved.moevement_min_window, resolved.moevement_max_window) == (4, 4)
    wider = dataclasses.replace(settings, moevement_min_window=2, moevement_max_window=6)
    assert wider.resolved() == wider


@pytest.mark.parametrize(
    ("given", "limits", "first"),
    [
        ({"moevement_window": 5}, (1, 8), 4),
        ({"moevement_window": 5, "moevement_max_replay_steps": 9}, (1, 5), 4),
        ({"moevement_window": 2, "moevement_max_replay_steps": 3}, (1, 2), 2),
        ({"moevement_window": 5, "moevement_min_window": 5, "moevement_max_window": 6}, (5, 6), 5),
        ({"moevement_window": Chosen.AUTO, "moevement_max_window": 3}, (1, 3), 3),
        ({"moevement_window": Chosen.AUTO}, (1, 8), 4),
    ],
)
def test_a_job_with_a_fixed_w_could_have_chosen_between_limits_of_its_own(given, limits, first):
    chosen = FaultTolerance(**given).resolved().automatic
    assert chosen.chooses_window
    assert ((chosen.windows[0], chosen.windows[-1]), chosen.first_window) == (limits, first)


def test_a_job_chooses_its_w_unless_one_is_given():
    assert FaultTolerance().chooses_window
    assert not FaultTolerance(moevement_window=4).chooses_window


def test_a_job_that_could_have_chosen_changes_its_schedule_by_itself():
    given = FaultTolerance(moevement_window=4, moevement_schedule_changes=parse_changes("20:4"))
    check_fault_tolerance(given.resolved().automatic, save=None)


@pytest.mark.parametrize("window", [1, 6])
def test_a_schedule_beyond_the_limits_of_w_is_refused(window):
    limits = {"moevement_min_window": 2, "moevement_max_window": 5}
    for changes in ({"moevement_window": window}, {"moevement_schedule_changes": ((9, window),)}):
        settings = FaultTolerance(**limits, **changes)
        wanted = tuple(ScheduleChange(*each) for each in settings.moevement_schedule_changes)
        settings = dataclasses.replace(settings, moevement_schedule_changes=wanted)
        with pytest.raises(UserError, match=f"W = {window} is not between"):
            check_fault_tolerance(settings, save=None)


def test_w_is_a_number_or_chosen():
    assert [parse_window(text) for text in ("1", "7", "auto")] == [1, 7, Chosen.AUTO]


@pytest.mark.parametrize(
    ("text", "reason"), [("0", "not at least 1"), ("Auto", "neither"), ("1.5", "neither")]
)
def test_what_is_no_w_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_window(text)


@pytest.mark.parametrize(
    ("given", "first", "limits"),
    [
        ({}, 4, (1, 8)),
        ({"moevement_max_window": 3}, 3, (1, 3)),
        ({"moevement_min_window": 6}, 6, (6, 8)),
        ({"moevement_min_window": 10}, 10, (10, 10)),
        ({"moevement_max_replay_steps": 9}, 4, (1, 5)),
        ({"moevement_max_replay_steps": 1}, 1, (1, 1)),
        ({"moevement_max_replay_steps": 100}, 4, (1, 8)),
        ({"moevement_max_window": 9, "moevement_max_replay_steps": 9}, 4, (1, 5)),
    ],
)
def test_a_job_that_chooses_w_has_limits(given, first, limits):
    settings = FaultTolerance(moevement_window=Chosen.AUTO, **given)
    check_fault_tolerance(settings, save=None)
    assert settings.first_window == first
    assert (settings.windows[0], settings.windows[-1]) == limits
    resolved = settings.resolved()
    assert (resolved.first_window, resolved.windows) == (first, settings.windows)
    steps = settings.moevement_max_replay_steps
    assert steps is None or max_replayed_steps(settings.windows[-1], LAG) <= steps


@pytest.mark.parametrize("window", [1, 2, Chosen.AUTO])
@pytest.mark.parametrize("limits", [{}, {"moevement_min_window": 1, "moevement_max_window": 9}])
def test_how_many_steps_may_be_replayed_does_not_decide_what_memory_is_like(window, limits):
    settings = FaultTolerance(moevement_window=window, **limits)
    for steps in (None, 3, 9, 100):
        launch = dataclasses.replace(settings, moevement_max_replay_steps=steps)
        check_fault_tolerance(launch, save=None)
        assert launch.min_window == settings.min_window
        assert launch.max_window == settings.max_window


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({}, [4, 3, 2, 1]),
        ({"moevement_min_window": 3}, [4, 3]),
        ({"moevement_min_window": 6}, [6]),
        ({"moevement_max_replay_steps": 3}, [2, 1]),
        ({"moevement_window": 3}, [3]),
        ({"moevement_window": 3, "moevement_min_window": 1, "moevement_max_window": 8}, [3]),
    ],
)
def test_a_job_that_chooses_w_may_begin_with_a_smaller_one(given, windows):
    assert [*FaultTolerance(**given).first_windows] == windows


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"moevement_window": 4, "moevement_max_replay_steps": 6}, "the largest W is 3"),
        ({"moevement_min_window": 6, "moevement_max_replay_steps": 9}, "the largest W is 5"),
        ({"moevement_schedule_changes": (ScheduleChange(9, 2),)}, "leave --moevement-schedule"),
    ],
)
def test_windows_that_can_not_be_are_refused(given, reason):
    settings = FaultTolerance(**{"moevement_window": Chosen.AUTO, **given})
    with pytest.raises(UserError, match=reason):
        check_fault_tolerance(settings, save=None)
