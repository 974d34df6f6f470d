# SPDX-License-Identifier: Apache-2.0
"""Protection takes the host memory that it announces: as the system sees it, at the peak.

./scripts/soak.sh
"""

import dataclasses
import signal
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from megatron_moevement.runtime.stores.store import folder_bytes
from tests.harness.foreseen import foreseen
from tests.harness.interruption import Run, send
from tests.harness.process_resources import disk_bytes, peak_bytes, reset_peak, shared_bytes
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1000)]

PROGRAM = Path(__file__).with_name("frugal_pretrain.py")
CASE = dataclasses.replace(Case.of("vpp2 bf16 distributed grouped", 3), replicas=1)
LARGE = (
    "--hidden-size=192",
    "--moe-ffn-hidden-size=384",
    "--num-experts=8",
    "--global-batch-size=4",
)
"""A slot takes some 19 MB."""
RANKS = range(CASE.combination.world_size)
STEPS = 10**5
FIRST, LAST = CASE.protected_from + 1, 20
"""Steps of the measurement; before it, what is used once for building the model is given back."""


@dataclasses.dataclass(frozen=True)
class Peaks:
    """The most memory that a process had in training, but for libraries.

    How many of their pages are in the memory of a process hangs on what else the machine does.

    Attributes:
        resident: files in memory included, as far as the process has touched them.
        own: without files.
        files: what the files of its store take, touched or not.
    """

    resident: int
    own: int
    files: int


def train(program, folder, store):
    """Returns the events of a run, and the peaks of each rank."""
    run = Run(dataclasses.replace(program, path=PROGRAM, train_iters=STEPS, timeout_s=500), folder)
    with run.start(f"--moevement-store-dir={store}") as job:
        job.wait_for_output(RANKS[-1], f"iteration {FIRST:8d}/")
        for pid in job.pids:
            reset_peak(pid)
        job.wait_for_output(RANKS[-1], f"iteration {LAST:8d}/")
        peaks = []
        for process, pid in enumerate(job.pids):
            resident = peak_bytes(pid) - disk_bytes(pid)
            files = sum(map(folder_bytes, store.glob(f"*/process-{process}")))
            peaks.append(Peaks(resident, resident - shared_bytes(pid), files))
        send(job, signal.SIGTERM, RANKS)
        job.wait().check()
    return events_of(run, EventName.ITERATION, None), peaks


def test_the_peak_grows_by_what_is_announced_and_no_more(
    megatron_fork_server, text, tmp_path, shared_memory
):
    unprotected = CASE.program(megatron_fork_server, text, *LARGE)
    _, without = train(unprotected, tmp_path / "off", shared_memory)
    protected = CASE.protected_program(megatron_fork_server, text, *LARGE)
    flags = [*protected.flags, f"--train-iters={STEPS}", f"--moevement-store-dir={shared_memory}"]
    said = foreseen(megatron_fork_server, len(RANKS), flags)
    events, peaks = train(protected, tmp_path / "on", shared_memory)
    for rank in RANKS:
        (announced,) = {one.fields["host_bytes"] for one in events if one.logical_rank == rank}
        assert announced == said[rank]["total_bytes"]
        resident = peaks[rank].resident - without[rank].resident
        taken = peaks[rank].files + peaks[rank].own - without[rank].own
        print(f"rank {rank}: {taken} bytes taken, {resident} touched, {announced} announced")
        assert announced / 2 < resident <= announced
        assert taken == pytest.approx(announced, rel=0.02)
