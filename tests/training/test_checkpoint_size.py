# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is said to need before it is written, and what its tensors take."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_moevement.runtime.coordination.agreement import all_gather_json

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DISTRIBUTED = "--use-distributed-optimizer"
TWO_STAGES = "--pipeline-model-parallel-size=2"
EXPERTS_APART = "--expert-model-parallel-size=2"
LAYOUTS = {
    "one rank": (1,),
    "replicas": (2,),
    "replicas, distributed optimizer": (2, DISTRIBUTED),
    "replicas, BF16": (2, "--bf16"),
    "replicas, BF16, distributed optimizer": (2, "--bf16", DISTRIBUTED),
    "experts apart": (2, EXPERTS_APART),
    "replicas of experts apart": (4, EXPERTS_APART, DISTRIBUTED, "--global-batch-size=8"),
    "TP2": (2, "--tensor-model-parallel-size=2", "--sequence-parallel"),
    "two stages with a tied embedding": (2, TWO_STAGES, "--bf16"),
    "two stages of replicas": (4, TWO_STAGES, "--untie-embeddings-and-output-weights"),
}


def save(folder, flags):
    """Saves before the first step; returns what all ranks said that they would write."""
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415  (needs the backend)

    with tiny_job(*flags) as job:
        said = sum(all_gather_json(job.durable.size_bytes(), job.device))
        job.durable.save(Path(folder), {})
    return said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_takes_what_it_is_said_to_take_at_most(layout, megatron_fork_server, tmp_path):
    world_size, *flags = LAYOUTS[layout]
    result = megatron_fork_server.run(save, world_size=world_size, args=[str(tmp_path), flags])
    said = set(result.check().values)
    metadata = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    taken = sum(
        one.size.numel() * one.properties.dtype.itemsize
        for one in metadata.values()
        if isinstance(one, TensorStorageMetadata)
    )
    assert len(said) == 1
    # FP32 weights are their own masters, and some are held by several ranks that write them once.
    assert taken <= said.pop() <= 1.6 * taken
