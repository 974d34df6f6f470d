"""Leaving a job: together when it ends well, at once when it does not."""

import os
import time
from datetime import timedelta

import pytest

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
