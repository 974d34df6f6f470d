# SPDX-License-Identifier: Apache-2.0
"""A frozen step that was interrupted leaves nothing that is put back at a later time."""

import pytest

from tests.harness.tiny_job import tiny_job

pytestmark = pytest.mark.distributed

SHARDED = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce"


def put_back_by_garbage_collection():
    """Interrupts a replay, begins another one, and collects the first; returns what hooks do."""
    import gc  # noqa: PLC0415

    from megatron_moevement.integrations.megatron.freezing import (  # noqa: PLC0415
        Freezing,
        FrozenWork,
    )

    with tiny_job(SHARDED, OVERLAP, "--overlap-param-gather") as job:
        chunk = job.chunks[0]

        def begin():
            freezing = Freezing(job.chunks, job.optimizer, FrozenWork.SKIPPED)
            freezing.set_active(frozenset())
            return freezing

        def overlaps():
            hooks, config = chunk.remove_forward_pre_hook_handles, chunk.ddp_config
            return [len(hooks) > 0, config.overlap_param_gather]

        seen = [overlaps()]
        interrupted = begin()
        seen.append(overlaps())
        interrupted.close()
        seen.append(overlaps())
        again = begin()
        del interrupted
        gc.collect()
        seen.append(overlaps())
        again.close()
        seen.append(overlaps())
        return seen


def test_a_replay_that_was_interrupted_is_put_back_at_once_and_never_later(megatron_fork_server):
    (seen,) = megatron_fork_server.run(put_back_by_garbage_collection, world_size=1).check().values
    usual, replaying = [True, True], [False, False]
    assert seen == [usual, replaying, usual, replaying, usual]
