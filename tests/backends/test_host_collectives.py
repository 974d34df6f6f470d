# SPDX-License-Identifier: Apache-2.0
"""The collectives of the CPU backend do what those of NCCL do."""

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.backends.host_collectives import all_gather
from megatron_moevement.backends.host_cuda import HostBackendError

pytestmark = pytest.mark.distributed


def gather(sizes, async_op):
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that leaves early would tear the connections of one that still joins
    try:
        rank = dist.get_rank()
        mine = torch.arange(2.0 * sizes[rank]).reshape(-1, 2) + 100 * rank
        gathered = [torch.full((size, 2), -1.0) for size in sizes]
        work = all_gather(gathered, mine, async_op=async_op)
        if work is not None:
            work.wait()
        return [one.tolist() for one in gathered]
    except HostBackendError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def expected(sizes):
    return [
        (torch.arange(2.0 * size).reshape(-1, 2) + 100 * rank).tolist()
        for rank, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 2), (0, 4, 0), (1, 0, 1)])
def test_every_rank_receives_the_tensors_of_all_whatever_their_sizes(fork_server, sizes):
    result = fork_server.run(gather, world_size=3, args=[list(sizes), False]).check()
    assert list(result.values) == [expected(sizes)] * 3


def test_tensors_of_one_size_are_gathered_asynchronously(fork_server):
    result = fork_server.run(gather, world_size=3, args=[[2, 2, 2], True]).check()
    assert list(result.values) == [expected((2, 2, 2))] * 3


def test_tensors_of_different_sizes_are_not(fork_server):
    result = fork_server.run(gather, world_size=2, args=[[1, 2], True]).check()
    assert all("needs a GPU" in said for said in result.values)
