# SPDX-License-Identifier: Apache-2.0
"""When restarts end, and which places processes take."""

import dataclasses

from nvidia_resiliency_ext.inprocess.exception import RestartAbort

from megatron_moevement.integrations.nvrx.retries import BoundedRetries
from megatron_moevement.policy.outcome.futility import Futility


@dataclasses.dataclass
class State:
    world_size: int = 5
    active_world_size: int = 4
    active_rank: int | None = 0
    iteration: int = 0


def limits(max_restarts=None, futility=Futility):
    return BoundedRetries(4, max_restarts, futility, lambda: None)


def stopped_after(retries, states):
    for number, state in enumerate(states):
        try:
            retries(state)
        except RestartAbort as error:
            return number, str(error)
    return None


def test_too_few_processes_stop_the_job():
    states = [State(), State(world_size=4, iteration=1), State(world_size=3, iteration=2)]
    assert stopped_after(limits(), states) == (2, "the job needs 4 processes and has 3")


def test_as_many_restarts_as_wanted():
    states = [State(iteration=number) for number in range(4)]
    assert stopped_after(limits(max_restarts=2), states) == (
        3,
        "--inprocess-max-iterations 2 is reached",
    )


def test_restarts_that_lead_nowhere_stop_the_job():
    found = iter([Futility(0, 5, number) for number in range(20)])
    states = [State(iteration=number) for number in range(20)]
    assert stopped_after(limits(futility=lambda: next(found)), states) == (
        10,
        "10 restarts in a row led to no new step",
    )


def test_generations_in_which_the_processes_never_meet_stop_the_job():
    states = [State(iteration=number) for number in range(40)]
    assert stopped_after(limits(), states) == (
        30,
        "in 30 restarts in a row the processes never met",
    )


def test_a_meeting_begins_the_count_anew():
    found = iter([Futility(number // 20, 5, 0) for number in range(100)])
    states = [State(iteration=number) for number in range(100)]
    assert stopped_after(limits(futility=lambda: next(found)), states) is None


def test_a_spare_that_waits_counts_nothing():
    states = [State(active_rank=None, iteration=number) for number in range(40)]
    assert stopped_after(limits(), states) is None
