# SPDX-License-Identifier: Apache-2.0
"""In-process restart: what its flags take, and which times contradict each other."""

import dataclasses

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.settings.restart import Granularity
from megatron_moevement.training.arguments import parse
from tests.harness.tiny_job import TINY

OF_MEGATRON = {
    "restart": False,
    "max_iterations": None,
    "monitor_thread_interval": 1.0,
    "monitor_process_interval": 1.0,
    "progress_watchdog_interval": 1.0,
    "heartbeat_interval": 30,
    "soft_timeout": 60,
    "hard_timeout": 90,
    "heartbeat_timeout": 60,
    "barrier_timeout": 120,
    "completion_timeout": 120,
    "last_call_wait": 1,
    "termination_grace_time": 1,
    "empty_cuda_cache": False,
}
"""As `_add_inprocess_restart_args` in Megatron-LM's megatron/training/arguments.py has them."""


def restart(*flags, processes=1, launched=None):
    return parse([*TINY, "--inprocess-restart", *flags], processes, launched)


def test_the_defaults_are_those_of_megatron():
    found = dataclasses.asdict(parse(TINY, 1).restart)
    # Megatron's is WORLD_SIZE; here it is what the launcher says.
    assert found.pop("inprocess_active_world_size") is None
    # Megatron's is the node, also where it has lost one process of several.
    assert found.pop("inprocess_granularity") is Granularity.RANK
    assert found == {f"inprocess_{name}": value for name, value in OF_MEGATRON.items()}
    assert restart().restart.times["soft_timeout"].total_seconds() == 60


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
