# SPDX-License-Identifier: Apache-2.0
"""A long protected run of two stages: threads, descriptors and memory stay what they were.

./scripts/soak.sh
"""

import psutil
import pytest

from tests.harness.combinations import ALWAYS
from tests.harness.protected_run import PROGRAM
from tests.harness.random_text import data_flags

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(3000)]

RANKS = 2
FIRST, LAST, EVERY = 400, 2400, 400
STEPS = LAST + EVERY
MOST_GROWTH_BYTES_PER_STEP = 1000
"""The history of losses takes some hundred; one slot that is kept too long takes 10,000."""
FLAGS = (
    "--pipeline-model-parallel-size=2",
    "--bf16",
    "--use-distributed-optimizer",
    "--micro-batch-size=1",
    "--global-batch-size=2",
    "--num-workers=1",
    "--moevement-no-progress-bar",
    "--moevement-strategy=moevement",
    "--moevement-window=3",
    "--moevement-replicas=1",
    f"--train-iters={STEPS}",
    f"--log-interval={EVERY}",
)


def observe(job):
    """Returns of each rank its threads, its descriptors and its memory."""
    seen = []
    for pid in job.pids:
        process = psutil.Process(pid)
        with process.oneshot():
            seen.append((process.num_threads(), process.num_fds(), process.memory_info().rss))
    return seen


def test_nothing_grows_over_two_thousand_steps(megatron_fork_server, text, tmp_path):
    flags = [
        *(*ALWAYS, *data_flags(text), *FLAGS),
        f"--data-cache-path={tmp_path / 'index'}",
        f"--moevement-store-dir={tmp_path / 'store'}",
        f"--moevement-event-dir={tmp_path / 'events'}",
    ]
    job = megatron_fork_server.start_program(PROGRAM, flags, world_size=RANKS, timeout_s=2800.0)
    with job:
        seen = []
        for step in range(FIRST, LAST + 1, EVERY):
            job.wait_for_output(RANKS - 1, f"iteration {step:8d}/")
            seen.append(observe(job))
        job.wait().check()
    for rank in range(RANKS):
        threads, descriptors, memory = zip(*(each[rank] for each in seen), strict=True)
        print(f"rank {rank}: {threads} threads, {descriptors} descriptors, {memory} bytes")
        assert len(set(threads)) == 1
        assert len(set(descriptors)) == 1
        assert memory[-1] - memory[0] <= (LAST - FIRST) * MOST_GROWTH_BYTES_PER_STEP
