# SPDX-License-Identifier: Apache-2.0
"""What is left of an interrupted pause of gradient reductions does nothing in a later step."""

import pytest

from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

FLAGS = ("--overlap-grad-reduce", "--use-distributed-optimizer", "--overlap-param-gather")


def digests_after(late):
    """Interrupts a pause of reductions, as a pipeline schedule leaves it, and trains on.

    Returns the digest of two more steps. What was left of the pause is collected in the first
    micro-batch of the second one, or never.
    """
    from megatron_moevement.integrations.megatron.transients import Transients  # noqa: PLC0415
    from megatron_moevement.training.steps import build_datasets, open_steps  # noqa: PLC0415

    with tiny_job(*FLAGS) as job, open_steps(job, build_datasets(job), START) as step:
        step.run(StopRequest.NONE)
        transients = Transients(job.chunks, job.optimizer, job.expert_bias, job.router_counts)
        left = [job.chunks[0].config.no_sync_func()]
        left[0].__enter__()
        transients.reset()
        step.run(StopRequest.NONE)
        if late:
            job.chunks[0].module.register_forward_hook(lambda *_: left.clear())
        step.run(StopRequest.NONE)
        return job.digests()


def test_what_is_left_of_an_interrupted_pause_ends_no_later_one(megatron_fork_server):
    never, late = (
        megatron_fork_server.run(digests_after, world_size=1, args=[late]).check().values[0]
        for late in (False, True)
    )
    assert late == never
