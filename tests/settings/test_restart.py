"""In-process restart: what its flags take, and which times contradict each other."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.settings.restart import Granularity, InProcessRestart
from megatron_moevement.testing.tiny_job import TINY
from megatron_moevement.training.arguments import parse


def restart(*flags, processes=1, launched=None):
    return parse([*TINY, "--inprocess-restart", *flags], processes, launched)


def test_the_defaults_are_those_of_megatron():
    assert parse(TINY, 1).restart == InProcessRestart()
    found = restart().restart
    assert found.interval("soft_timeout").total_seconds() == 60
    assert found.inprocess_granularity is Granularity.NODE


@pytest.mark.parametrize(
    ("flag", "limit"),
    [
        ("--inprocess-soft-timeout=90", "--inprocess-hard-timeout 90"),
        ("--inprocess-hard-timeout=120", "--inprocess-barrier-timeout 120"),
        ("--inprocess-heartbeat-timeout=130", "--inprocess-barrier-timeout 120"),
        ("--inprocess-heartbeat-interval=60", "--inprocess-heartbeat-timeout 60"),
        ("--inprocess-monitor-process-interval=61", "--inprocess-heartbeat-timeout 60"),
        ("--inprocess-monitor-thread-interval=60", "--inprocess-soft-timeout 60"),
        ("--inprocess-progress-watchdog-interval=75", "--inprocess-soft-timeout 60"),
    ],
)
def test_times_that_would_take_a_healthy_process_for_a_lost_one_are_refused(flag, limit):
    name, _, seconds = flag.partition("=")
    with pytest.raises(UserError, match=f"{name} {seconds} must be less than {limit}"):
        restart(flag)
    assert parse([*TINY, flag], 1).restart  # without restarts they say nothing


def test_spares_are_what_the_launcher_or_the_flag_says():
    assert restart(processes=4, launched=3).world_size == 3
    assert restart("--inprocess-active-world-size=2", processes=4, launched=3).world_size == 2
    assert restart(processes=3).world_size == 3


def test_spares_without_restart_and_too_few_processes_are_refused():
    with pytest.raises(UserError, match="1 of 3 processes are spares"):
        parse(TINY, 3, 2)
    with pytest.raises(UserError, match="--inprocess-active-world-size 4: the job has 3"):
        restart("--inprocess-active-world-size=4", processes=3)
