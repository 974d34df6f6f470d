# SPDX-License-Identifier: Apache-2.0
"""After new process groups were set into old objects, training goes on with the same bits."""

import gc

import pytest

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.default_run import slow_but
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

JOBS = {
    "pp2, ep2, sharded, overlapped": (
        4,
        [
            "--pipeline-model-parallel-size=2",
            "--expert-model-parallel-size=2",
            "--bf16",
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
            "--moe-router-load-balancing-type=global_aux_loss",
            "--moe-aux-loss-coeff=1e-2",
        ],
    ),
    "vpp2": (
        2,
        [
            "--num-layers=4",
            "--pipeline-model-parallel-size=2",
            "--num-virtual-stages-per-pipeline-rank=2",
        ],
    ),
    "tp2": (2, ["--tensor-model-parallel-size=2", "--sequence-parallel"]),
    "dp2, shared experts": (2, ["--moe-shared-expert-intermediate-size=32"]),
}


def train(flags, restart_after):
    """Trains four steps; returns the digest, and how many references were rebound."""
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with tiny_job(*flags) as job:
        roots = [job.chunks, job.optimizer, job.schedule, job.metrics, job.groups, job.durable]
        from megatron_moevement.integrations.megatron.group_references import (  # noqa: PLC0415
            GroupReferences,
        )

        references, former = None, []
        with open_steps(job, build_datasets(job), START) as step:
            for number in range(4):
                if number == restart_after:
                    references = GroupReferences(roots)
                    former = restart(job, references)
                step.run(StopRequest.NONE)
        gc.collect()
        assert [group().group_desc for group in former if group() is not None] == []
        return job.digests(), 0 if references is None else len(references)


def restart(job, references):
    """Destroys every process group and builds new ones, as all ranks do after a fault.

    Returns weak references to the former groups.
    """
    import os  # noqa: PLC0415
    import weakref  # noqa: PLC0415

    import torch.distributed as dist  # noqa: PLC0415
    from megatron.core import parallel_state  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.process_groups import build_groups  # noqa: PLC0415

    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    former = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    references.release()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("second generation", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    build_groups(job.arguments.parallelism, job.arguments.architecture.num_layers)
    references.rebind()
    return former


@pytest.mark.parametrize("name", slow_but(("pp2, ep2, sharded, overlapped",), JOBS))
def test_new_groups_in_old_objects_change_no_bit(megatron_fork_server, name):
    world_size, flags = JOBS[name]
    ours = megatron_fork_server.run(train, world_size=world_size, args=[flags, 2]).check().values
    theirs = megatron_fork_server.run(train, world_size=world_size, args=[flags, None]).check()
    assert [digest for digest, _ in ours] == [digest for digest, _ in theirs.values]
    assert all(count > 10 for _, count in ours)


def find_unnamed(flags):
    import torch.distributed as dist  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.group_references import (  # noqa: PLC0415
        GroupReferences,
        UnnamedGroupError,
    )

    with tiny_job(*flags) as job:
        job.chunks[0].module.stray = [dist.new_group()]
        try:
            GroupReferences([job.chunks])
        except UnnamedGroupError as error:
            return str(error)
        return None


def test_a_group_that_nobody_could_replace_is_found_at_start(megatron_fork_server):
    (said,) = set(megatron_fork_server.run(find_unnamed, world_size=2, args=[[]]).check().values)
    assert "stray[0] has no name" in said


def keep_in_a_tuple(flags):
    import torch.distributed as dist  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.group_references import (  # noqa: PLC0415
        GroupReferences,
        UnnamedGroupError,
    )

    with tiny_job(*flags):
        try:
            GroupReferences([{"frozen": (dist.group.WORLD,)}])
        except UnnamedGroupError as error:
            return str(error)
        return None


def test_a_group_in_a_tuple_is_refused(megatron_fork_server):
    (said,) = megatron_fork_server.run(keep_in_a_tuple, world_size=1, args=[[]]).check().values
    assert "nothing can be set" in said
