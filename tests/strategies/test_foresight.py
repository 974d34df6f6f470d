# SPDX-License-Identifier: Apache-2.0
"""What `moevement check` says before a job starts is what the job allocates, byte by byte."""

import dataclasses
import re
import time
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName
from tests.harness.default_run import slow_but
from tests.harness.foreseen import foreseen
from tests.harness.interruption import Run, kill_all
from tests.harness.protected_run import Case
from tests.harness.restarted_run import events_of, restartable_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SPARED = dataclasses.replace(Case.of("vpp2 bf16 distributed grouped", 3), replicas=1)
CASES = [SPARED, Case.of("edp3 fp16 distributed bias", 2)]
_LONG = 10**4
_PATIENCE_S = 30
_AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) *(.*)")


def areas(pid):
    """Yields size, whether it is private, name and flags of each memory area of a process."""
    area = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := _AREA.fullmatch(line):
            first, last, mode, _, name = match.groups()
            area = (int(last, 16) - int(first, 16), mode.endswith("p"), name)
        elif line.startswith("VmFlags:"):
            yield *area, line.split()[1:]


def log_bytes(pid):
    """Returns the private memory that forks leave out: the upstream log and nothing else."""
    return sum(size for size, private, name, flags in areas(pid) if private and "dc" in flags)


def nameless_bytes(pid, folder):
    """Returns the files without a name in a folder that a process has mapped."""
    return sum(
        size
        for size, private, name, _ in areas(pid)
        if not private and name.startswith(str(folder)) and name.endswith("(deleted)")
    )


def file_sizes(store, process):
    """Returns the files of a process that have a size from the start, by name."""
    (folder,) = store.glob(f"*/process-{process}")
    names = [path.name for path in folder.iterdir()]
    return {
        name: (folder / name).stat().st_size
        for name in names
        if name == "journal" or name.endswith(".ring")
    }


def await_reserve(pid, folder, wanted_bytes):
    """Waits until a process without a rank has prepared memory for one."""
    end = time.monotonic() + _PATIENCE_S
    while nameless_bytes(pid, folder) + log_bytes(pid) < wanted_bytes and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.parametrize("case", slow_but([SPARED], CASES), ids=lambda case: case.name)
def test_files_and_logs_have_the_sizes_that_were_foreseen(
    megatron_fork_server, text, tmp_path, shared_memory, case
):
    ranks, spares = case.combination.world_size, 1 if case is SPARED else 0
    program = restartable_program(case, megatron_fork_server, text, spares)
    program = dataclasses.replace(program, train_iters=_LONG)
    store = f"--moevement-store-dir={shared_memory}"
    flags = [*program.flags, f"--train-iters={_LONG}", store]
    said = foreseen(megatron_fork_server, ranks + spares, flags)
    assert not any(shared_memory.iterdir())
    run = Run(program, tmp_path)
    with run.start(store) as job:
        job.wait_for_output(ranks - 1, f"iteration {case.protected_from:8d}/")
        if spares:
            await_reserve(job.pids[ranks], shared_memory, said[ranks]["reserve_bytes"])
        sizes = [file_sizes(shared_memory, process) for process in range(ranks + spares)]
        logs = [log_bytes(pid) for pid in job.pids]
        nameless = [nameless_bytes(pid, shared_memory) for pid in job.pids]
        kill_all(job, ranks + spares)
    for number, one in enumerate(said):
        found = {"own": 0, "held": 0, "journal": 0}
        for name, size in sizes[number].items():
            found[name.partition("-")[0]] += size
        assert found == {
            "own": one["own_slots_bytes"],
            "held": one["held_slots_bytes"],
            "journal": one["ledger_bytes"],
        }
        if one["rank"] is None:
            assert nameless[number] + logs[number] == one["reserve_bytes"]
        else:
            assert (logs[number], nameless[number]) == (one["logs_bytes"], 0)
    announced = {
        event.logical_rank: event.fields["host_bytes"]
        for event in events_of(run, EventName.ITERATION, None)
    }
    assert announced == {
        number: one["total_bytes"] for number, one in enumerate(said) if one["rank"] is not None
    }
