# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that not every rank sees yet count on no rank, nor do those that lack a part."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.training.checkpoints import CheckpointFolder

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


def seen(folder, *flags):
    """Returns what a job finds in a folder: of `--load`, of its own saves, in a later launch."""
    from megatron_moevement.settings.checkpointing import Checkpointing  # noqa: PLC0415
    from megatron_moevement.training.checkpoint_store import CheckpointStore  # noqa: PLC0415

    settings = Checkpointing(save=folder, load=folder, **dict.fromkeys(flags, True))
    store = CheckpointStore(settings, None, {}, CPU)
    checkpoints = CheckpointFolder(Path(folder))
    checkpoints.begin_history()
    checkpoints.begin(4)
    checkpoints.commit(4, {})
    found = [store._loadable(), store._saved()]
    checkpoints.begin_history()
    return [*found, store._loadable()]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [[4], [4], [4]]),
        (["no_save_optim"], [[], [], [4]]),
        (["no_save_rng"], [[], [], [4]]),
    ],
)
def test_no_recovery_goes_on_from_a_checkpoint_that_lacks_a_part(
    megatron_fork_server, tmp_path, flags, expected
):
    """The next launch finds it, and says which flags it takes."""
    job = megatron_fork_server.run(seen, world_size=1, args=[str(tmp_path), *flags])
    assert job.check().values == (expected,)
