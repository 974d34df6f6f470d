# SPDX-License-Identifier: Apache-2.0
"""A log on a device that is slow to copy: no message between stages waits for the host."""

from unittest import mock

import pytest

from tests.harness.boundary_jobs import JOBS, SIZES, boundary_run

pytestmark = pytest.mark.distributed


def train_on_a_slow_device(flags, config):
    """Returns how often a step waits for all streams of a device that is slow to copy."""
    from megatron_moevement.backends import host_cuda  # noqa: PLC0415
    from megatron_moevement.integrations.megatron.boundary_log import (  # noqa: PLC0415
        LoggedCommunicator,
    )
    from megatron_moevement.runtime.upstream_log.log_writer import (  # noqa: PLC0415
        BackgroundWriter,
    )
    from tests.harness.slow_device import SlowDevice  # noqa: PLC0415

    with (
        boundary_run(flags, config) as (job, run),
        SlowDevice(latency_s=0.001) as device,
        BackgroundWriter(run.log, device.copy_stream()) as writer,
        mock.patch.object(host_cuda, "synchronize", device.synchronize),
    ):
        communicator = LoggedCommunicator(job.groups.pp, job.chunks[0].config, writer)
        with job.schedule.communicating_by(communicator):
            run.train(2)
        writer.await_landed()
        return [device.synchronized, len(run.log.sent(2)), len(run.log.received(2))]


@pytest.mark.parametrize("name", ["pp2", "vpp2-overlapped"])
def test_no_message_waits_for_copies_to_the_host(megatron_fork_server, name):
    ranks, flags, config = JOBS[name]
    _, chunks, messages = SIZES[name]
    result = megatron_fork_server.run(
        train_on_a_slow_device, world_size=ranks, args=[flags, config]
    ).check()
    crossings = (2 * chunks - 1) * messages
    assert [one[0] for one in result.values] == [0, 0]
    assert {sum(one[1:]) for one in result.values} == {2 * crossings}
