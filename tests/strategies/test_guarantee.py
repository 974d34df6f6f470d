# SPDX-License-Identifier: Apache-2.0
"""All ranks agree on a guarantee, and a process that computes otherwise costs it for good."""

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.backends.cpu import CpuBackend
from megatron_moevement.policy.job.guarantee import (
    Computation,
    Computations,
    DeviceKind,
    Guarantee,
    Kernels,
)
from megatron_moevement.runtime.coordination.agreement import all_gather_json
from megatron_moevement.strategies.moevement.agreed_guarantee import agree_on_guarantee, judge
from megatron_moevement.strategies.moevement.carried_state import (
    CarriedState,
    Outage,
    Promise,
)

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")


def computation(threads=1):
    parts = CpuBackend().parts()
    return Computation(DeviceKind.CPU, Kernels.DETERMINISTIC, threads, parts, {})


def live_through(generations):
    """Agrees once for each generation; a rank that is named in it is new, with its threads."""
    dist.init_process_group("gloo")
    rank, carried, own, found = dist.get_rank(), CarriedState(), computation(), []
    try:
        for newcomers in generations:
            if str(rank) in newcomers:
                carried, own = CarriedState(), computation(newcomers[str(rank)])
            told = all_gather_json(own.document(), CPU)
            by_rank = tuple(Computation.of_document(one) for one in told)
            job = Computations(by_rank, ("host",) * len(told))
            judged = all_gather_json(judge(job, carried), CPU)
            found.append(list(agree_on_guarantee(job, judged, carried).lacking))
    finally:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("generations", "lacking"),
    [
        pytest.param([{}, {"0": 1}, {"1": 1}, {"2": 1}], [0, 0, 0, 0], marks=pytest.mark.slow),
        # Nobody of the first generation is left when the last rank is replaced by another one.
        ([{}, {"0": 1}, {"1": 1}, {"2": 2}], [0, 0, 0, 1]),
        # Once lost it stays lost, for newcomers too, when every rank computes as at first again.
        ([{}, {"0": 2}, {"0": 1}, {"1": 1, "2": 1}], [0, 1, 1, 1]),
    ],
)
def test_a_newcomer_is_compared_with_what_the_job_began_with(
    megatron_fork_server, generations, lacking
):
    found = megatron_fork_server.run(live_through, world_size=3, args=[generations]).check().values
    assert all(one == found[0] for one in found)
    assert [min(len(one), 1) for one in found[0]] == lacking


def test_what_is_given_up_keeps_the_guarantee_and_the_outage():
    promise = Promise(Computations((computation(),), ("host",)), Guarantee())
    carried = CarriedState(promise=promise, outage=Outage(joined_s=1.0))
    anew = CarriedState.anew(carried)
    assert (anew.store, anew.promise, anew.outage) == (carried.store, promise, carried.outage)


def test_the_cpu_tells_its_parts():
    parts = CpuBackend().parts()
    assert parts["torch"] == torch.__version__
    assert all(parts.values())
