"""When restarts end, and which places processes take."""

import dataclasses

import pytest
from nvidia_resiliency_ext.inprocess.exception import RestartAbort

from megatron_moevement.integrations.nvrx.retries import BoundedRetries


@dataclasses.dataclass
class State:
    world_size: int = 5
    active_world_size: int = 4
    active_rank: int | None = 0
    iteration: int = 0


def limits(max_restarts=None, committed=lambda: 0):
    return BoundedRetries(4, max_restarts, committed, lambda: None)


def stopped_after(retries, states):
    for number, state in enumerate(states):
        try:
            retries(state)
        except RestartAbort as error:
            return number, str(error)
    return None


def test_too_few_processes_stop_the_job():
    states = [State(), State(world_size=4, iteration=1), State(world_size=3, iteration=2)]
    assert stopped_after(limits(), states) == (2, "3 processes are left and 4 are needed")


def test_as_many_restarts_as_wanted():
    states = [State(iteration=number) for number in range(4)]
    assert stopped_after(limits(max_restarts=2), states) == (
        3,
        "--inprocess-max-iterations 2 is reached",
    )


def test_restarts_that_lead_nowhere_stop_the_job():
    states = [State(iteration=number) for number in range(20)]
    assert stopped_after(limits(), states) == (10, "10 restarts in a row led to no new step")


@pytest.mark.parametrize("progress", ["steps", "losses"])
def test_restarts_with_progress_or_lost_processes_go_on(progress):
    counter = iter(range(100))
    committed = (lambda: next(counter)) if progress == "steps" else (lambda: 0)
    size = {"steps": lambda number: 5, "losses": lambda number: 50 - number}[progress]
    states = [State(world_size=size(number), iteration=number) for number in range(30)]
    assert stopped_after(limits(committed=committed), states) is None


def test_a_spare_that_waits_counts_nothing():
    states = [State(active_rank=None, iteration=number) for number in range(30)]
    assert stopped_after(limits(), states) is None
