# SPDX-License-Identifier: Apache-2.0
"""Another program writes into the control store of a job: nothing of it counts, nothing is run."""

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
import time
from datetime import timedelta
from random import Random

import pytest
import torch.distributed as dist

from tests.harness.interruption import Run, digest_differences
from tests.harness.protected_run import Case
from tests.harness.restarted_run import (
    await_step,
    kill_rank,
    restartable_program,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

COMMAND = (sys.executable, "-m", "megatron_moevement.cli", "stores")
CASE = dataclasses.replace(Case.of("vpp2 bf16 distributed grouped", 3), deaths=1)
PROCESSES = 3
PLACES = ("attempt0", *(f"attempt0/_inprocess_{generation}" for generation in range(3)))
PICKLED = ("state", "key")
ON_S, OFF_S = 1.5, 1.5


class Mark:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@contextlib.contextmanager
def stranger(port, folder, keys_of):
    """Writes pickles into a store for some time, and again after a while, until the end."""
    bad, stop = pickle.dumps(Mark(folder)), threading.Event()

    def write():
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20))
        while not stop.is_set():
            until_s = time.monotonic() + ON_S
            while time.monotonic() < until_s and not stop.wait(0.001):
                for key in keys_of(store):
                    store.set(key, bad)
            stop.wait(OFF_S)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def pickled_keys(_):
    return [f"{at}/{name}_{n}" for at in PLACES for name in PICKLED for n in range(PROCESSES)]


def all_keys(store):
    return {*pickled_keys(store), *store.list_keys()}


@pytest.fixture
def control():
    """Serves a control store and yields its port."""
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = dict(pair.split("=") for pair in process.stdout.readline().split())
            yield int(said["MOEVEMENT_CONTROL_PORT"])
        finally:
            process.kill()


def start_of(server, text, control, folder):
    program = restartable_program(CASE, server, text, 1)
    env = {"MOEVEMENT_CONTROL_PORT": str(control)}
    return Run(dataclasses.replace(program, env=env), folder)


def test_pickles_are_not_run_and_training_goes_on(
    megatron_fork_server, text, uninterrupted, control, tmp_path
):
    mark = tmp_path / "run by a rank"
    run = start_of(megatron_fork_server, text, control, tmp_path)
    with stranger(control, mark, pickled_keys), run.start() as job:
        await_step(run, job, CASE.protected_from)
        lost = kill_rank(run, job, 1, Random(1))
        result = job.wait()
    assert not mark.exists()
    codes = [code for process, code in enumerate(result.exit_codes) if process != lost]
    assert codes == [0, 0], result.describe()
    assert digest_differences(run._digest(), uninterrupted(CASE)) == []
    said = "".join(rank.stderr for rank in result.ranks)
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_store_full_of_pickles_ends_the_job_at_the_most(
    megatron_fork_server, text, control, tmp_path
):
    mark = tmp_path / "run by a rank"
    run = start_of(megatron_fork_server, text, control, tmp_path)
    with stranger(control, mark, all_keys), run.start() as job:
        result = job.wait()
    assert not mark.exists()
    assert not result.timed_out, result.describe()
    said = "".join(rank.stderr for rank in result.ranks)
    assert "Traceback" not in said
    if any(result.exit_codes):
        assert "stops: " in said
