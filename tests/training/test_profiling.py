# SPDX-License-Identifier: Apache-2.0
"""The iterations that were asked for are profiled, on the ranks that were asked for."""

import errno
import json

import pytest

from megatron_moevement.errors import UserError
from tests.harness.tiny_job import tiny_arguments, tiny_job

PROFILED = ["--profile", "--use-pytorch-profiler", "--profile-step-start=2", "--profile-step-end=5"]


def train(flags):
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training import loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    with tiny_job("--log-interval=100", "--moevement-no-progress-bar", *flags) as job:
        loop.train(job, StopSources(None), Resident(job.arguments, job.backend), Generation())
        return job.digests()


def steps_in(trace):
    events = json.loads(trace.read_bytes())["traceEvents"]
    named = {event["name"] for event in events if "name" in event}
    assert any("aten::" in name for name in named)
    return len({name for name in named if name.startswith("ProfilerStep#")})


@pytest.mark.distributed
def test_torch_profiles_the_iterations_after_the_start_up_to_the_end(
    megatron_fork_server, tmp_path
):
    trace = [*PROFILED, f"--tensorboard-dir={tmp_path}"]
    plain, all_of_them, one = (
        megatron_fork_server.run(train, world_size=2, args=[flags]).check().values
        for flags in ([], trace, [*trace, "--profile-ranks", "1"])
    )
    assert plain == all_of_them == one
    traces = sorted(tmp_path.glob("*.pt.trace.json*"))
    assert [steps_in(found) for found in traces] == [3, 3, 3]


@pytest.mark.distributed
def test_a_job_that_ends_before_writes_what_it_has(megatron_fork_server, tmp_path):
    trace = [*PROFILED, "--profile-step-end=100", f"--tensorboard-dir={tmp_path}"]
    megatron_fork_server.run(train, world_size=1, args=[[*trace, "--train-iters=4"]]).check()
    (trace,) = tmp_path.glob("*.pt.trace.json*")
    assert steps_in(trace) == 2 + 1  # torch begins one where another ends


class BrokenError(Exception):
    pass


def fail_in_a_profiled_step(flags):
    from megatron_moevement.runtime.coordination.generation import Generation  # noqa: PLC0415
    from megatron_moevement.training import loop  # noqa: PLC0415
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

    def fail(self, iteration, *_, **__):
        raise BrokenError

    with tiny_job("--moevement-no-progress-bar", *flags) as job:
        report, loop.TrainingLoop._report = loop.TrainingLoop._report, fail
        with pytest.raises(BrokenError):
            loop.train(job, StopSources(None), Resident(job.arguments, job.backend), Generation())
        loop.TrainingLoop._report = report
    return train(flags)


@pytest.mark.distributed
def test_a_failure_stops_the_profiler_without_a_trace_and_a_later_job_has_one(
    megatron_fork_server, tmp_path
):
    flags = ["--profile", "--use-pytorch-profiler", "--profile-step-start=0"]
    flags += ["--profile-step-end=2", f"--tensorboard-dir={tmp_path}"]
    megatron_fork_server.run(fail_in_a_profiled_step, world_size=1, args=[flags]).check()
    (trace,) = tmp_path.glob("*.pt.trace.json*")
    assert steps_in(trace) == 2


def full_disk(flags):
    from torch.profiler import profile  # noqa: PLC0415

    def refuse(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    profile.export_chrome_trace = refuse
    return train(flags)


@pytest.mark.distributed
def test_a_trace_that_cannot_be_written_ends_no_training(megatron_fork_server, tmp_path):
    flags = [*PROFILED, f"--tensorboard-dir={tmp_path}"]
    job = megatron_fork_server.run(full_disk, world_size=1, args=[flags]).check()
    assert f"no trace in {tmp_path}: " in job.ranks[0].stderr


def test_an_end_before_the_start_is_refused():
    with pytest.raises(UserError, match="--profile-step-end 12 must be above"):
        tiny_arguments("--profile", "--profile-step-start=12")


def test_a_trace_needs_a_folder():
    with pytest.raises(UserError, match="give --tensorboard-dir"):
        tiny_arguments("--profile", "--use-pytorch-profiler")
