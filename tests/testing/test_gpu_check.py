# SPDX-License-Identifier: Apache-2.0
"""The command that checks a GPU runs on a CPU, goes on where it was, and sees what is wrong."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_moevement.runtime.observation.events import EventName, EventRecord
from tests.harness.gpu_check import __main__ as command
from tests.harness.gpu_check import marked_tests, pieces, synchronizations, throughput
from tests.harness.gpu_check.device_work import device_time_of
from tests.harness.gpu_check.jobs import Ended, judged
from tests.harness.gpu_check.measured_jobs import PROGRAM, Measured
from tests.harness.gpu_check.part import PARTS
from tests.harness.gpu_check.results import Conditions, Result, Scale, State, newest
from tests.harness.gpu_check.waits import STEP, waits_of
from tests.harness.nccl_like import install

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"
HERE = Conditions("a machine", "sources", "small")


def check(results, *arguments):
    """Runs the command where no GPU is seen; returns its exit code and its lines."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    ended = subprocess.run(
        [SCRIPT, "--results", results, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ended.stderr, ended.stderr
    return ended.returncode, ended.stdout.splitlines()


def result(state=State.GREEN, part="copies", conditions=HERE, problems=()):
    return Result(
        part, state, "2026-01-01T00:00:00+00:00", 1.0, conditions, {"GB/s": 2.5}, problems
    )


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_the_command_runs_small_on_a_cpu_and_goes_on_where_it_was(tmp_path):
    parts = [f"--part={name}" for name in ("copies", "log", "synchronizations")]
    code, lines = check(tmp_path, *parts)
    assert code == 0, lines
    assert [newest(tmp_path, name).state for name in ("copies", "log")] == [State.GREEN] * 2
    assert newest(tmp_path, "synchronizations").state is State.NEEDS_GPU
    assert len(list(tmp_path.iterdir())) == 3
    before = (tmp_path / "copies.json").read_bytes()
    code, lines = check(tmp_path, *parts)
    assert code == 0
    assert lines[:2] == ["copies: green already", "log: green already"]
    assert (tmp_path / "copies.json").read_bytes() == before
    code, lines = check(tmp_path, "--report")
    assert code == 0
    rows = [line.split(" | ")[:2] for line in lines if line.startswith("| ")]
    assert rows[1:] == [
        ["| copies", "green"],
        ["| log", "green"],
        ["| synchronizations", "needs a GPU"],
    ]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3000)
def test_no_part_is_red_on_a_cpu(tmp_path):
    code, lines = check(tmp_path)
    assert code == 0, lines
    assert [newest(tmp_path, name) is None for name in PARTS] == [False] * len(PARTS)


@pytest.mark.distributed
def test_a_part_that_takes_too_long_is_red(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "LIMIT_S", 0.01)
    assert command.main(["--part=machine", f"--results={tmp_path}"]) == 1
    assert newest(tmp_path, "machine").state is State.RED
    assert "no result within" in capsys.readouterr().out
    assert command.main(["--report", f"--results={tmp_path}"]) == 1


@pytest.mark.parametrize("field", ["machine", "sources", "scale"])
def test_a_result_holds_for_the_conditions_it_was_found_under(tmp_path, field):
    result().save(tmp_path)
    kept = newest(tmp_path, "copies")
    assert kept == result(problems=[])
    assert kept.holds_for(HERE)
    assert not kept.holds_for(Conditions(**{**vars(HERE), field: "another"}))
    assert not result(State.RED).holds_for(HERE)


def test_a_file_that_is_no_result_is_none(tmp_path):
    (tmp_path / "copies.json").write_text('{"part": "copies", "sta')
    assert newest(tmp_path, "copies") is None


def test_a_skipped_test_is_a_problem(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='passes'/>"
        "<testcase classname='a' name='waits'><skipped message='needs'/></testcase>"
        "</testsuite></testsuites>"
    )
    found = marked_tests.judged(report)
    assert found.figures == {"tests": 2, "passed": 1}
    assert found.problems == ["a.waits: skipped: needs"]
    report.write_text("<testsuites/>")
    assert marked_tests.judged(report).problems == ["no test is marked"]


def test_the_measured_program_reads_nothing_of_megatron_before_its_backend(tmp_path):
    head, found, _ = PROGRAM.read_text().partition("backend = load")
    assert found
    head += 'sys.exit(sum(name.startswith("megatron.core") for name in sys.modules))\n'
    (tmp_path / "head.py").write_text(head)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    ended = subprocess.run([sys.executable, tmp_path / "head.py"], env=environment, check=False)
    assert ended.returncode == 0


def event(name, ts, tid, cat="cuda_runtime", dur=1):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


def trace(extra=()):
    """Returns two steps on thread 7, each with a wait; thread 8 waits, too."""
    steps = [event(STEP, ts, 7, "user_annotation", 100) for ts in (0, 200)]
    shown_by_the_device = event(STEP, 0, 99, "gpu_user_annotation", 400)
    calls = [event("cudaLaunchKernel", 5, 7), event("cudaMemcpyAsync", 6, 7)]
    waits = [event("cudaStreamSynchronize", ts, 7) for ts in (50, 250)]
    between = event("cudaDeviceSynchronize", 150, 7)
    beside = event("cudaEventSynchronize", 60, 8)
    process_name = {"ph": "M", "name": "process_name", "pid": 1, "ts": 0}
    return [process_name, shown_by_the_device, *steps, *calls, *waits, between, beside, *extra]


def test_calls_that_wait_are_counted_within_the_steps_by_thread():
    assert waits_of(trace()) == {
        "steps": 2,
        "calls": 5,
        "training thread": {"cudaStreamSynchronize": 2},
        "other threads": {"cudaEventSynchronize": 1},
    }


def test_one_added_wait_in_a_step_is_the_barriers_and_two_are_too_many():
    more = [event("cudaDeviceSynchronize", ts, 7) for ts in (70, 270)]
    again = [event("cudaDeviceSynchronize", ts, 7) for ts in (80, 280)]
    off, one, two = (waits_of(trace(extra)) for extra in ([], more, more + again))
    assert synchronizations.judged(off, one).problems == []
    assert synchronizations.judged(off, two).problems == [
        "the training thread waits 2 times more in a step"
    ]
    steps_alone = waits_of([each for each in trace() if each.get("cat") != "cuda_runtime"])
    assert synchronizations.judged(steps_alone, steps_alone).problems


def on_device(name, ts, stream, cat, dur):
    return {**event(name, ts, stream, cat, dur), "args": {"stream": stream}}


def test_the_time_of_the_device_is_told_by_what_it_does_and_for_whom():
    """Milliseconds of a step; two steps of 100 us."""
    did = [
        *(on_device("gemm", ts, 7, "kernel", 20) for ts in (10, 60, 210, 260)),
        on_device("Memcpy DtoH (Device -> Pinned)", 40, 7, "gpu_memcpy", 8),
        on_device("Memcpy HtoD (Pinned -> Device)", 240, 7, "gpu_memcpy", 4),
        on_device("cast", 10, 20, "kernel", 6),
        on_device("Memcpy DtoH (Device -> Pinned)", 20, 20, "gpu_memcpy", 30),
        on_device("between two steps", 150, 7, "kernel", 1000),
    ]
    assert device_time_of(trace(did)) == {
        "step, ms": 0.1,
        "kernels, ms": 0.04,
        "copies to the host, ms": 0.004,
        "idle, ms": 0.054,
        "kernels of other streams, ms": 0.003,
        "copies to the host of other streams, ms": 0.015,
    }
    assert device_time_of(trace()) == {}


@pytest.mark.parametrize(("pair_s", "pairs"), [(10.0, 4), (150.0, 2), (500.0, 1)])
def test_no_pair_begins_that_would_end_too_late(monkeypatch, tmp_path, pair_s, pairs):
    now_s, ran = [0.0], []

    def run(folder, name, flags, *, warm_up):
        now_s[0] += pair_s / 2
        ran.append(name)
        return job(1.0, 5)

    monkeypatch.setattr(throughput, "flags_of", lambda scale: ())
    monkeypatch.setattr(throughput, "run_measured", run)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    throughput.measure(Scale.FULL, tmp_path)
    assert ran == [f"{kind}{pair}" for pair in range(pairs) for kind in ("off", "on")]


class Iteration:
    def __init__(self, duration_s, captured_bytes):
        self.fields = {"duration_s": duration_s, "stall_s": 0.1, "captured_bytes": captured_bytes}


def job(duration_s, captured_bytes=0):
    return Measured([Iteration(duration_s, captured_bytes)] * 3, 1 << 30, {}, {}, [])


@pytest.mark.parametrize(
    ("on", "limit", "problems"),
    [
        (job(1.01, 5), 1.01, 0),
        (job(1.02, 5), 1.01, 1),
        (job(1.02, 5), None, 0),
        (job(1.0, 0), 1.01, 1),
    ],
)
def test_a_slow_job_and_an_iteration_that_is_not_captured_are_problems(on, limit, problems):
    found = throughput.judged([job(1.0)], [on], limit)
    assert len(found.problems) == problems
    assert found.figures["peak memory on, GiB"] == 1


def ended(digest, verdict="GLOBAL", *, verified=True, replayed=(4, 5), code=0):
    recorded = [
        (EventName.PLAN, 0, {"verdict": verdict}),
        *(
            (EventName.REPLAY, step, {"replay_verified": verified, "frozen": 1})
            for step in replayed
        ),
        (EventName.RECOVERED, 0, {"guarantee": "EXACT"}),
    ]
    events = [EventRecord(0.0, 0, 1, 1, step, name, fields) for name, step, fields in recorded]
    return Ended(code, "told", digest, events)


def test_a_recovery_with_a_verified_replay_and_the_same_digest_is_green():
    found = judged(ended("bits"), ended("bits"), "GLOBAL", [])
    assert found.problems == []
    assert found.figures["steps replayed"] == found.figures["with frozen operators"] == 2


@pytest.mark.parametrize(
    "recovered",
    [
        ended("other bits"),
        ended(None),
        ended("bits", code=1),
        ended("bits", "LOCALIZED"),
        ended("bits", verified=False),
        ended("bits", replayed=(4,)),
    ],
)
def test_what_a_recovery_lacks_is_a_problem(recovered):
    assert len(judged(ended("bits"), recovered, "GLOBAL", []).problems) == 1


def test_iterations_are_told_apart_by_the_way_of_their_copies():
    names = [name for name in pieces.WAYS for _ in range(2)] * 2
    times = {name: 0.01 * place for place, name in enumerate(pieces.WAYS)}
    iterations = [
        SimpleNamespace(fields={"duration_s": times[name], "copy_s": 0.002, "stall_s": 0.0})
        for name in names
    ]
    assert pieces.by_way(iterations, 2) == {
        name: f"{time * 1e3:.1f} ms (copies 2.0, stall 0.0)" for name, time in times.items()
    }


def test_ranks_share_the_gpus_that_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = []
    for rank in range(5):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        install.share_devices()
        found.append(os.environ["LOCAL_RANK"])
    assert found == ["0", "1", "0", "1", "0"]


def test_every_part_is_a_function_of_its_module():
    folder = Path(command.__file__).parent
    for part in PARTS.values():
        assert f"def {part.function}(" in (folder / f"{part.module}.py").read_text(), part.name
