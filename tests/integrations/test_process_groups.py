# SPDX-License-Identifier: Apache-2.0
"""Joining a job: neighbours connect before they send. Leaving it: together if it ends well."""

import functools
import os
import time
from datetime import timedelta

import pytest

from tests.harness.nccl_like.abort import FOLDER_VARIABLE

pytestmark = pytest.mark.distributed

SKEW_S = 0.5


def leave_after(delays_s, patience_s):
    """Leaves a job of which each rank is done at another time; returns who was done by then."""
    import torch.distributed as dist  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.process_groups import join_job, leave_job  # noqa: PLC0415
    from megatron_moevement.settings.launch import Launch  # noqa: PLC0415

    launch = Launch.from_environment()
    join_job(launch, "gloo", timedelta(seconds=30))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    dist.barrier()
    time.sleep(delays_s[launch.rank])
    store.set(f"done/{launch.rank}", "")
    leave_job(timedelta(seconds=patience_s))
    return [rank for rank in range(launch.world_size) if store.check([f"done/{rank}"])]


@pytest.mark.parametrize("slowest", range(3))
def test_no_rank_leaves_before_the_last_is_done(megatron_fork_server, slowest):
    delays_s = [SKEW_S if rank == slowest else 0.0 for rank in range(3)]
    result = megatron_fork_server.run(leave_after, world_size=3, args=[delays_s, 30])
    assert result.check().values == ([0, 1, 2],) * 3


def test_a_rank_without_patience_leaves_alone(megatron_fork_server):
    result = megatron_fork_server.run(leave_after, world_size=2, args=[[0.0, SKEW_S], 0])
    assert result.check().values[0] == [0]


def test_a_rank_whose_peer_never_comes_leaves_when_its_patience_is_over(megatron_fork_server):
    result = megatron_fork_server.run(leave_after, world_size=2, args=[[0.0, 2.0], 0.1])
    assert result.check().values[0] == [0]


def send_both_ways(stages, connects):
    """Sends single messages around each of two pipelines; returns what came from both sides."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from megatron.core.pipeline_parallel.p2p_communication import _p2p_ops  # noqa: PLC0415
    from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.process_groups import connect_groups  # noqa: PLC0415
    from tests.harness.nccl_like.group import NcclLikeGroup  # noqa: PLC0415
    from tests.harness.nccl_like.install import install  # noqa: PLC0415

    install()
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), 2 * stages
    pipelines = [dist.new_group([*range(first, world, 2)]) for first in range(2)]
    pipeline = pipelines[rank % 2]
    connect_groups(ProcessGroupCollection(pp=pipeline), torch.device("cpu"), neighbours=connects)
    NcclLikeGroup.may_connect = False
    own, before, behind = torch.tensor([rank]), torch.empty(1).long(), torch.empty(1).long()
    works = _p2p_ops(
        tensor_send_prev=own,
        tensor_recv_prev=before,
        tensor_send_next=own,
        tensor_recv_next=behind,
        group=pipeline,
        prev_pipeline_rank=(rank - 2) % world,
        next_pipeline_rank=(rank + 2) % world,
    )
    for work in works.values():
        work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return [before.item(), behind.item()]


@pytest.mark.parametrize("stages", [2, 3])
def test_neighbours_make_no_communicator_when_they_send(megatron_fork_server, tmp_path, stages):
    world, env = 2 * stages, {FOLDER_VARIABLE: str(tmp_path)}
    run = functools.partial(megatron_fork_server.run, send_both_ways, world_size=world, env=env)
    values = run(args=[stages, True]).check().values
    assert list(values) == [[(rank - 2) % world, (rank + 2) % world] for rank in range(world)]


def test_without_a_message_before_they_make_one(megatron_fork_server, tmp_path):
    env = {FOLDER_VARIABLE: str(tmp_path)}
    result = megatron_fork_server.run(send_both_ways, world_size=6, args=[3, False], env=env)
    assert "communicator 0:1 of 2 ranks is made too late" in result.describe()
