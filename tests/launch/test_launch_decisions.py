# SPDX-License-Identifier: Apache-2.0
"""What the launcher decides: exit codes, the meaning of a death, a rank's environment."""

from datetime import timedelta
from pathlib import Path

import pytest

from megatron_moevement.cli.launch import (
    Job,
    OnDeath,
    RankExit,
    StorePorts,
    in_order_of_cause,
    job_exit_code,
    rank_environment,
)


def job(active=2, spares=0, flags=()):
    return Job(active, spares, Path("train.py"), tuple(flags), timedelta(seconds=1), None)


def exits(*statuses):
    return [RankExit(rank, status) for rank, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("spares", "flags", "expected"),
    [
        (0, (), OnDeath.STOP_THE_JOB),
        (1, (), OnDeath.CARRY_ON),
        (0, ("--bf16", "--inprocess-restart"), OnDeath.CARRY_ON),
        (0, ("--inprocess-active-world-size", "2"), OnDeath.STOP_THE_JOB),
    ],
)
def test_a_death_stops_the_job_unless_others_can_carry_on(spares, flags, expected):
    assert job(2, spares, flags).on_death is expected


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [((0, 0), 0), ((0, 3), 3), ((5, 3), 5), ((-9, 1), 137), ((1, -15), 1), ((0, -15), 143)],
)
def test_without_restart_the_first_failure_is_the_jobs(statuses, expected):
    assert job_exit_code(job(), exits(*statuses)) == expected


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((0, 0, 0), 0),  # nothing happened, the spare was not needed
        ((-9, 0, 0), 0),  # the spare took over
        ((1, 0, 0), 0),
        ((-9, -9, 0), 137),  # one more than there were spares
        ((-9, 75, 75), 75),  # the survivors flushed their state
        ((-9, 1, 75), 75),
        ((-9, 1, -15), 1),
        ((2, 2, 2), 2),
        ((-9, 75, 130), 130),  # Ctrl-C while the survivors flushed
        ((130, 0, 0), 0),
    ],
)
def test_with_a_spare_as_many_as_were_active_must_end_well(statuses, expected):
    assert job_exit_code(job(2, 1), exits(*statuses)) == expected


def test_of_deaths_noticed_together_a_signal_comes_first():
    together = in_order_of_cause(exits(0, 1, -9))
    assert together == [RankExit(2, -9), RankExit(0, 0), RankExit(1, 1)]


def test_spares_count_for_the_world_and_not_for_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    environment = rank_environment(job(4, 2), 5, StorePorts(1234, 1235), "s", {"HOME": "/h"})
    assert environment == {
        "HOME": "/h",
        "RANK": "5",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "6",
        "MOEVEMENT_ACTIVE_RANKS": "4",
        "MOEVEMENT_FAILURE_DOMAIN": "5",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "MOEVEMENT_CONTROL_PORT": "1235",
        "MOEVEMENT_SECRET": "s",
        "OMP_NUM_THREADS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def test_a_rank_has_one_thread_where_ranks_outnumber_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    assert rank_environment(job(8), 0, StorePorts(1, 2), "s", {})["OMP_NUM_THREADS"] == "1"


def test_threads_and_failure_domain_that_are_given_stay():
    given = {"OMP_NUM_THREADS": "3", "MOEVEMENT_FAILURE_DOMAIN": "rack7", "RANK": "9"}
    environment = rank_environment(job(), 1, StorePorts(1, 2), "s", given)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["MOEVEMENT_FAILURE_DOMAIN"] == "rack7"
    assert environment["RANK"] == "1"
