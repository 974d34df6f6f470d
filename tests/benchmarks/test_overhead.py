# SPDX-License-Identifier: Apache-2.0
"""The command that compares jobs with protection and without: its jobs, its figures, its loop."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tests.harness.benchmarks import BENCHMARKS, benchmark

SMALL = (
    "--num-layers=2",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--ffn-hidden-size=64",
    "--moe-ffn-hidden-size=32",
    "--seq-length=16",
)


@pytest.fixture(scope="module")
def overhead():
    return benchmark("overhead")


def steps(overhead, duration_s, cpu_s, captured_bytes=0.0):
    """Steps as of a job of which each is this one."""
    return overhead.Steps(
        *(np.full(8, each) for each in (duration_s, cpu_s, 0.0, captured_bytes, 0.0, 0.0)), 0.5
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_small_job_is_measured_with_protection_and_without(tmp_path):
    found = tmp_path / "found.json"
    own = ("--mode=overlap", "--minutes=0", "--turns=2", "--steps=3", "--window=2", "--dropped=1")
    ended = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "overhead.py", *own, "--iteration-s=0.1"),
            *(f"--json={found}", *SMALL),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "| rounds x steps | 2 x 3 |" in ended.stdout
    measured = json.loads(found.read_text())["overlap"]
    assert len(measured["rounds"]) == 2
    for pair in measured["rounds"]:
        assert not any(pair["off"]["captured_bytes"] + pair["off"]["log_bytes"])
        assert all(pair["on"]["captured_bytes"] + pair["on"]["log_bytes"])
        assert sum(pair["on"]["replicated_bytes"]) > 0
        for side in pair.values():
            assert all(0 < each < 2 for each in side["duration_s"])  # the other's turn is not in it
            assert all(each > 0 for each in side["cpu_s"])
    assert measured["bare_s_per_byte"] > 0
    assert f"{measured['figures']['ratio of steps']['value']:.4g}" in ended.stdout


def test_figures_of_steps_that_are_all_the_same_have_no_width(overhead):
    pair = overhead.Round(steps(overhead, 2.0, 1.0), steps(overhead, 3.0, 1.25, 1e6))
    result = overhead.Result([pair] * 3, bare_s=1e-7)
    figures = result.figures()
    assert figures["ratio of steps"] == overhead.Estimate(1.5, 1.5, 1.5)
    assert figures["ratio of CPU"] == overhead.Estimate(1.25, 1.25, 1.25)
    assert figures[overhead.PER_BYTE] == overhead.Estimate(250.0, 250.0, 250.0)
    assert figures["protection / bare loop"].value == pytest.approx(2.5, rel=1e-12)


def test_an_interval_has_the_median_of_rounds_that_differ_in_it(overhead):
    off = steps(overhead, 1.0, 1.0)
    rounds = [overhead.Round(off, steps(overhead, each, 1.0, 1.0)) for each in (1.0, 1.1, 1.5)]
    assert overhead.estimates(rounds)["ratio of steps"] == overhead.Estimate(1.1, 1.0, 1.5)


def test_cpu_seconds_are_those_at_the_ends_of_the_steps(overhead):
    clocks = object.__new__(overhead.Clocks)
    clocks._read = [(0.0, 10.0, 1.0, 2.0), (2.0, 14.0, 2.0, 6.0), (4.0, 14.0, 2.0, 10.0)]
    cpu_s, busy = clocks.at([1.0, 2.0, 3.0])
    assert list(cpu_s) == [12.0, 14.0, 14.0]
    assert busy == 0.5 / 4.0


def test_the_bare_loop_keeps_what_it_sends(overhead):
    assert overhead.bare_loop(4096, rounds=3) > 0


def await_states(processes, wanted):
    """Waits until all processes are in a state: signals take effect a moment later."""
    ends_s = time.monotonic() + 30
    while any(each.status() != wanted for each in processes):
        assert time.monotonic() < ends_s, [each.status() for each in processes]
        time.sleep(0.01)


def test_a_job_has_the_cores_in_its_turn_alone(overhead):
    endless = "import os; os.fork(); os.write(1, b'.')\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE) as process:
        job = psutil.Process(process.pid)
        try:
            assert process.stdout is not None
            assert process.stdout.read(2) == b".."  # of both processes
            everyone = [job, *job.children()]
            assert len(everyone) == 2
            turns = overhead.Turns(process)
            await_states(everyone, psutil.STATUS_STOPPED)
            with turns.turn():
                await_states(everyone, psutil.STATUS_RUNNING)
            await_states(everyone, psutil.STATUS_STOPPED)
        finally:
            for each in (*job.children(), job):
                each.kill()
