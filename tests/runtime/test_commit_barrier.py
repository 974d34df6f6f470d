# SPDX-License-Identifier: Apache-2.0
"""Behind the barrier every rank knows the same, or every rank has stopped."""

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.policy.watching.measurements import Reduced
from megatron_moevement.runtime.coordination.commit_barrier import (
    CommitBarrier,
    DisagreementError,
    ReplicaRng,
    StopRequest,
    Vote,
)

pytestmark = pytest.mark.distributed

SMALLEST = 2.0**-149
"""The smallest loss that FP32 can hold."""


def vote_of(**changes):
    fields = {
        "step": 3,
        "loss": None,
        "num_tokens": 0,
        "found_inf": (False, False),
        "grad_norm": 0.1,
        "stop": StopRequest.NONE,
    }
    return Vote(**fields | changes)


def wait_with(votes):
    """Votes with what the list holds for this rank; returns the agreement, or the disagreement."""
    dist.init_process_group("gloo")
    try:
        changes = dict(votes[dist.get_rank()])
        if "found_inf" in changes:
            changes["found_inf"] = tuple(changes["found_inf"])
        if "stop" in changes:
            changes["stop"] = StopRequest(changes["stop"])
        agreement = CommitBarrier(torch.device("cpu")).wait(vote_of(**changes))
        told = [agreement.loss, agreement.num_tokens, agreement.stop.name, *agreement.own_s]
        return [*told, "writing"] if agreement.is_writing else told
    except DisagreementError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def outcome(fork_server, votes):
    """Returns what all ranks learned, which must be the same."""
    values = fork_server.run(wait_with, world_size=len(votes), args=[votes]).check().values
    assert all(value == values[0] for value in values)
    return values[0]


@pytest.mark.parametrize("loss", [4.875, 0.0, SMALLEST, 1e38])
def test_all_learn_the_bits_of_the_loss_from_those_who_computed_it(fork_server, loss):
    loss = torch.tensor(loss, dtype=torch.float32).item()
    votes = [{}, {"loss": loss, "num_tokens": 64}, {"loss": loss, "num_tokens": 64}]
    assert outcome(fork_server, votes) == [loss, 64, "NONE"]


@pytest.mark.parametrize(
    ("wishes", "agreed"),
    [((0, 0, 0), "NONE"), ((0, 1, 0), "DURATION"), ((1, 0, 2), "SIGNAL"), ((0, 1, 1), "DURATION")],
)
def test_all_stop_when_one_wants_to_for_the_strongest_reason(fork_server, wishes, agreed):
    votes = [{"loss": 1.0, "num_tokens": 1, "stop": stop} for stop in wishes]
    assert outcome(fork_server, votes) == [1.0, 1, agreed]


def test_all_learn_how_long_each_has_computed(fork_server):
    votes = [{"own_s": own_s} for own_s in (0.25, 0.0, 3600.000001)]
    votes[0] |= {"loss": 1.0, "num_tokens": 1}
    assert outcome(fork_server, votes) == [1.0, 1, "NONE", 0.25, 0.0, 3600.000001]


def learn_all(measured):
    """Votes with everything that a vote may have; returns what this rank learned of it."""
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        own = Reduced(*measured[rank])
        vote = vote_of(loss=1.0, measured=own, replica_rng=ReplicaRng(0, 1, 7), own_s=rank / 4)
        found = CommitBarrier(torch.device("cpu")).wait(vote)
        return [found.measured._asdict(), found.rng_equal, found.own_s]
    finally:
        dist.destroy_process_group()


def test_all_learn_the_greatest_of_each_number_that_ranks_measured(fork_server):
    measured = [[-9, -5, -3, 0, 9, 6], [-2, -6, -1, 4, 8, 7]]
    greatest = {
        "to_host": -2,
        "to_holder": -5,
        "iteration": -1,
        "stall": 4,
        "contention": 9,
        "delay": 7,
    }
    values = fork_server.run(learn_all, world_size=2, args=[measured]).check().values
    assert values == ([greatest, True, [0.0, 0.25]],) * 2


@pytest.mark.parametrize(("writing", "told"), [((0, 1, 0), ["writing"]), ((0, 0, 0), [])])
def test_all_learn_whether_any_still_writes_its_part_of_a_checkpoint(fork_server, writing, told):
    votes = [{"loss": 1.0, "is_writing": bool(one)} for one in writing]
    assert outcome(fork_server, votes) == [1.0, 0, "NONE", *told]


@pytest.mark.parametrize("grad_norm", [0.0, SMALLEST, 12.5, None])
def test_equal_gradient_statistics_pass(fork_server, grad_norm):
    overflow = [grad_norm is None, False]
    votes = [{"loss": 1.0, "grad_norm": grad_norm, "found_inf": overflow}] * 2
    assert outcome(fork_server, votes) == [1.0, 0, "NONE"]


def norm_behind(norms):
    """Returns what the ranks, each with a norm of its own, clip by; in hexadecimal."""
    dist.init_process_group("gloo")
    try:
        vote = vote_of(loss=1.0, grad_norm=norms[dist.get_rank()])
        return CommitBarrier(torch.device("cpu")).wait(vote).grad_norm.hex()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("larger", [0.1 + 2**-56, 0.1 * (1 + 2**-22)])
def test_replicas_that_round_otherwise_clip_by_the_greatest_norm(fork_server, larger):
    norms = [0.1, larger, 0.1]
    values = fork_server.run(norm_behind, world_size=3, args=[norms]).check().values
    assert values == (larger.hex(),) * 3


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"grad_norm": 0.1 * (1 + 2**-21)}, "gradient norm"),  # no rounding of three ranks
        ({"grad_norm": None}, "gradient norm"),
        ({"found_inf": [False, True]}, "overflow"),
        ({"found_inf": [True, False]}, "overflow"),
        ({"step": 4}, "step"),
        ({"step": 2}, "step"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_no_rank_passes_when_one_has_other_gradients(fork_server, changes, name, rank):
    votes = [{"loss": 1.0} | (changes if one == rank else {}) for one in range(3)]
    values = fork_server.run(wait_with, world_size=3, args=[votes]).check().values
    assert all(value.startswith(f"{name} at the barrier of step ") for value in values)


def compare_streams(streams):
    """Votes with group and digest of this rank, or without; returns whether all were alike."""
    dist.init_process_group("gloo")
    try:
        own = streams[dist.get_rank()] if streams else None
        groups = 1 + max((group for group, _ in streams), default=0)
        vote = vote_of(loss=1.0, replica_rng=own and ReplicaRng(own[0], groups, own[1]))
        return CommitBarrier(torch.device("cpu")).wait(vote).rng_equal
    finally:
        dist.destroy_process_group()


LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("streams", "alike"),
    [
        ([(0, 7), (1, 8), (0, 7), (1, 8)], True),
        ([(0, 0), (0, 0), (1, LARGEST), (2, LARGEST)], True),
        ([(0, 7), (0, 7), (1, 8), (1, 9)], False),
        ([(0, 0), (0, LARGEST), (1, 8), (1, 8)], False),
        ([], False),
    ],
)
def test_all_learn_whether_replicas_have_the_same_random_streams(fork_server, streams, alike):
    job = fork_server.run(compare_streams, world_size=4, args=[streams])
    assert set(job.check().values) == {alike}


def come_late(seconds):
    """Returns when this rank came to the barrier and when it left it."""
    import time  # noqa: PLC0415

    dist.init_process_group("gloo")
    time.sleep(seconds * dist.get_rank())
    came = time.monotonic()
    CommitBarrier(torch.device("cpu")).wait(vote_of(loss=1.0))
    left = time.monotonic()
    dist.destroy_process_group()
    return [came, left]


def test_no_rank_leaves_before_the_last_one_came(fork_server):
    times = fork_server.run(come_late, world_size=3, args=[0.2]).check().values
    assert min(left for _, left in times) >= max(came for came, _ in times)
