# SPDX-License-Identifier: Apache-2.0
"""All ranks take a step together, or none does and all know why."""

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.runtime.coordination.agreement import (
    AgreementError,
    all_gather_json,
    gather_distinct,
    gather_read_together,
    gather_unlike,
    together,
)
from tests.harness.one_of_many import Values, one_of_many

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
        ["x" * 100_000, "", "y" * 4095],
    ],
)
def test_every_rank_gets_the_values_of_all_in_their_order(fork_server, values):
    result = fork_server.run(gather, world_size=3, args=[values]).check()
    assert list(result.values) == [values] * 3


def test_one_rank_that_speaks_for_many_makes_no_other_one_receive_more():
    values = ["x" * 20_000, *(["x" * 5000] * 63)]
    with one_of_many(len(values), 1) as group:
        group.script(Values(values))
        assert all_gather_json(values[1], CPU) == values
        assert group.received_bytes < 1.1 * sum(map(len, values))


def test_short_values_of_many_ranks_take_little_memory():
    values = list(range(5000))
    with one_of_many(len(values), 7) as group:
        group.script(Values(values))
        assert all_gather_json(7, CPU) == values
        assert group.received_bytes < 2 << 20


def compare(digests):
    dist.init_process_group("gloo")
    try:
        return gather_unlike(digests[dist.get_rank()], CPU)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "digests",
    [["00ff7f", "00ff7f", "01ff7f"], ["00ff7f", "00fe7f", "00ff7f"], ["00", "ff", "00"]],
)
def test_all_ranks_see_that_one_has_another_digest(fork_server, digests):
    result = fork_server.run(compare, world_size=3, args=[digests]).check()
    assert list(result.values) == [digests] * 3


def test_digests_that_are_alike_are_not_gathered():
    with one_of_many(1000, 5) as group:
        assert gather_unlike("00ff7f" * 10, CPU) == []
        assert group.received_bytes == 2 * 30


def tell_apart(values):
    dist.init_process_group("gloo")
    try:
        return gather_distinct(values[dist.get_rank()], CPU)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("values", "distinct"),
    [
        (["b", "a", "b"], ["b", "a"]),
        ([None, ["x" * 9000], ["x" * 9000]], [None, ["x" * 9000]]),
        ([1, 1, 1], [1]),
    ],
)
def test_each_value_is_there_once_by_the_first_rank_that_has_it(fork_server, values, distinct):
    result = fork_server.run(tell_apart, world_size=3, args=[values]).check()
    assert list(result.values) == [distinct] * 3


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


def read_of(outcomes):
    """Returns what rank 0 of many reads where ranks' actions have come to these values."""
    known = []

    def read(rank, value):
        known.append(rank)
        return value * 2

    with one_of_many(len(outcomes), 0) as group:
        group.script(Values(outcomes))
        return gather_read_together(lambda: outcomes[0][0], CPU, read), known


def test_what_an_action_returns_is_read_rank_by_rank():
    assert read_of([[1, None], ["a", None], [2, None]]) == ([2, "aa", 4], [0, 1, 2])


def test_what_one_rank_could_not_do_is_raised_instead_of_read():
    with pytest.raises(AgreementError, match=r"rank 1: KeyError: 'lost'"):
        read_of([[1, None], [None, ["KeyError", "'lost'"]], [None, ["OSError", "full"]]])
