"""All ranks take a step together, or none does and all know why."""

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.runtime.coordination.agreement import (
    AgreementError,
    all_gather_json,
    together,
)

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")


def gather(values):
    dist.init_process_group("gloo")
    try:
        return all_gather_json(values[dist.get_rank()], CPU)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "values",
    [
        [0, None, "word"],
        ["", "x" * 5000, "\u00e9\u4e2d"],
        ["x" * 4093, "y" * 4094, "z" * 4095],
        [{"a": [1, 2.5, {"b": False}]}, [], {}],
        [2**53 + 1, -0.1, 1e-320],
    ],
)
def test_every_rank_gets_the_values_of_all_in_their_order(fork_server, values):
    result = fork_server.run(gather, world_size=3, args=[values]).check()
    assert list(result.values) == [values] * 3


def act(failing):
    """Acts with a collective inside; the ranks listed fail after it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def action():
        total = torch.tensor([rank])
        dist.all_reduce(total)
        if rank in failing:
            raise OSError(f"disk {rank}\nis full")
        return [rank, int(total)]

    try:
        return together(action, CPU)
    except AgreementError as error:
        return {"line": str(error), "reason": error.reason, "cause": type(error.__cause__).__name__}
    finally:
        dist.destroy_process_group()


def test_every_rank_gets_its_own_result_when_all_succeeded(fork_server):
    result = fork_server.run(act, world_size=3, args=[[]]).check()
    assert list(result.values) == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.parametrize("failing", [[0], [2], [1, 2], [0, 1, 2]])
def test_every_rank_raises_the_reason_of_the_first_that_failed(fork_server, failing):
    values = fork_server.run(act, world_size=3, args=[failing]).check().values
    first = failing[0]
    for rank, value in enumerate(values):
        assert value["line"] == f"rank {first}: OSError: disk {first} is full"
        assert value["reason"] == f"disk {first} is full"
        assert value["cause"] == ("OSError" if rank in failing else "NoneType")


def interrupt():
    dist.init_process_group("gloo")

    def action():
        raise KeyboardInterrupt

    try:
        together(action, CPU)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        dist.destroy_process_group()


def test_an_interrupt_is_no_failure_to_agree_on(fork_server):
    assert fork_server.run(interrupt, world_size=1).check().values == ("interrupted",)
