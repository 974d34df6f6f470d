# SPDX-License-Identifier: Apache-2.0
"""A rank that is built without memory has the sizes of the rank that trains."""

import pytest

from tests.harness.tiny_job import PLAIN, TINY

pytestmark = pytest.mark.distributed


def sizes_of(job):
    """Returns what the plan of a job is made from, of one rank, and the bytes of its state."""
    from megatron_moevement.integrations.megatron.snapshots import LiveOperators  # noqa: PLC0415
    from megatron_moevement.integrations.megatron.weightless import state_bytes  # noqa: PLC0415
    from megatron_moevement.strategies.moevement.opening import member_of  # noqa: PLC0415
    from megatron_moevement.training.protection import live_objects_of  # noqa: PLC0415

    objects = live_objects_of(job)
    live = LiveOperators(objects.chunks, objects.optimizer)
    member = member_of(objects, live, "domain").document()
    assert objects.ends is live_objects_of(job).ends
    return [member, state_bytes(objects.chunks, objects.optimizer), objects.ends.value]


def both(flags, base):
    """Builds this rank twice, as a job does and by itself; returns the sizes of both."""
    import torch  # noqa: PLC0415

    from megatron_moevement.backends.backend import choose, load  # noqa: PLC0415
    from megatron_moevement.integrations.megatron.group_keys import OwnKeys  # noqa: PLC0415
    from megatron_moevement.integrations.megatron.weightless import (  # noqa: PLC0415
        weightless_rank,
    )
    from megatron_moevement.runtime.faults.fault_points import FaultPoints  # noqa: PLC0415
    from megatron_moevement.settings.launch import Launch  # noqa: PLC0415
    from megatron_moevement.training.job import build_part  # noqa: PLC0415
    from tests.harness.tiny_job import tiny_job  # noqa: PLC0415

    with tiny_job(*flags, base=base) as job:
        built = sizes_of(job)
        arguments, identity = job.arguments, job.identity
    launch = Launch.from_environment()
    backend = load(choose(None))
    layers = int(arguments.architecture.num_layers)
    with weightless_rank(
        launch.rank, launch.world_size, arguments.parallelism, layers, backend.name
    ) as groups:
        part = build_part(
            *(arguments, identity, launch, backend, groups),
            faults=FaultPoints((), launch.rank),
            known=OwnKeys.ALONE,
        )
        assert all(one.is_meta for chunk in part.chunks for one in chunk.parameters())
        alone = sizes_of(part)
    assert not torch.empty(1).is_meta
    return [built, alone]


def check(server, world_size, flags, base=TINY):
    """Asserts that what is built alone is what is built together, on every rank."""
    result = server.run(both, world_size=world_size, args=[flags, base], timeout_s=60).check()
    for built, alone in result.values:
        assert alone == built


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--bf16", "--use-distributed-optimizer", "--moe-grouped-gemm"],
        [
            "--fp16",
            "--moe-router-load-balancing-type=none",
            "--moe-router-enable-expert-bias",
            "--moe-router-score-function=sigmoid",
            "--overlap-grad-reduce",
        ],
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_one_rank(megatron_fork_server, flags):
    check(megatron_fork_server, 1, flags)


def test_a_dense_model(megatron_fork_server):
    check(megatron_fork_server, 1, ["--fp16"], PLAIN)


LAYOUTS = {
    "pp2 ep2, shards": (
        4,
        "--pipeline-model-parallel-size=2 --expert-model-parallel-size=2 --bf16 "
        "--use-distributed-optimizer",
    ),
    "tp2 dp3, shards": (
        6,
        "--tensor-model-parallel-size=2 --sequence-parallel --fp16 --use-distributed-optimizer "
        "--moe-grouped-gemm",
    ),
    "vpp2, tied ends": (
        2,
        "--pipeline-model-parallel-size=2 --num-layers=4 "
        "--num-virtual-stages-per-pipeline-rank=2 --bf16",
    ),
    "a stage without experts": (
        2,
        "--pipeline-model-parallel-size=2 --moe-layer-freq=([0,1]) --use-distributed-optimizer",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_of_a_layout(megatron_fork_server, layout):
    world_size, flags = LAYOUTS[layout]
    check(megatron_fork_server, world_size, flags.split())
