# SPDX-License-Identifier: Apache-2.0
"""What the patch of Megatron's optimizers is for: checkpoints of torch's Adam."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESUME = """
import sys
from pathlib import Path
from megatron_moevement.backends import cpu
cpu.install()
from megatron_moevement.integrations.megatron.unsharded_state import read_unsharded_state
from megatron_moevement.runtime.coordination.commit_barrier import StopRequest
from megatron_moevement.runtime.coordination.progress import START
from megatron_moevement.training.steps import build_datasets, open_steps
from tests.harness.tiny_job import tiny_job

folder, steps, *flags = sys.argv[1:]

def trained(job, start, count):
    with open_steps(job, build_datasets(job), start) as step:
        for _ in range(count):
            step.run(StopRequest.NONE)
        return step.progress

with tiny_job(*flags) as job:
    saved = trained(job, START, int(steps))
    job.durable.save(Path(folder), {})
    kept = job.digests()
    trained(job, saved, 1)
    expected = job.digests()
with tiny_job(*flags) as job:
    common = read_unsharded_state(Path(folder))
    job.durable.load(Path(folder), common, with_optimizer=True, with_random_state=True)
    assert job.digests() == kept
    trained(job, saved, 1)
    assert job.digests() == expected
"""


def resume(folder, steps, *flags):
    """Saves after some steps, loads in a new job, and compares one more step of both."""
    command = [sys.executable, "-W", "ignore", "-c", RESUME, str(folder), str(steps), *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_distributed_optimizer_loads_the_state_it_saved(tmp_path):
    resume(tmp_path, 2, "--use-distributed-optimizer", "--bf16")


def test_several_buckets_of_the_distributed_optimizer_are_saved(tmp_path):
    buckets = ["--overlap-grad-reduce", "--ddp-bucket-size=20000"]
    resume(tmp_path, 2, "--use-distributed-optimizer", *buckets, "--bf16")


@pytest.mark.slow  # by default one that overflows loads it
@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_the_other_optimizers_load_the_state_they_saved(tmp_path, precision):
    resume(tmp_path, 2, precision)


def test_a_step_of_zero_is_saved_while_every_step_has_overflowed(tmp_path):
    resume(tmp_path, 1, "--fp16", "--initial-loss-scale=1e30")
