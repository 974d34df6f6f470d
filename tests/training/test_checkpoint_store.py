"""Checkpoints that not every rank sees yet count on no rank."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")


def newest(loadable, saved):
    """Returns the newest steps in `--load` and in `--save`; each rank sees lists of its own."""
    from megatron_moevement.settings.checkpointing import Checkpointing  # noqa: PLC0415
    from megatron_moevement.training.checkpoint_store import CheckpointStore  # noqa: PLC0415

    dist.init_process_group("gloo")
    try:
        store = CheckpointStore(Checkpointing(), None, {}, CPU)
        store._loadable = lambda: loadable[dist.get_rank()]
        store._saved = lambda: saved[dist.get_rank()]
        return dataclasses.astuple(store.newest())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("loadable", "saved", "expected"),
    [
        ([[8, 4], [4]], [[], []], [4, 0]),
        ([[], []], [[6], [8, 6]], [0, 6]),
        ([[8, 4], []], [[8], [4]], [0, 0]),
    ],
)
def test_the_newest_checkpoint_is_one_that_all_ranks_see(
    megatron_fork_server, loadable, saved, expected
):
    job = megatron_fork_server.run(newest, world_size=2, args=[loadable, saved])
    assert job.check().values == (expected, expected)
