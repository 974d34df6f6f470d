# SPDX-License-Identifier: Apache-2.0
"""The launcher with real processes: `scripts/run_local.sh` and small programs as ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from megatron_moevement.runtime.observation.events import EventLog, EventName
from tests.harness.log_lines import log_lines

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import json, os, pathlib, signal, sys, time
RANK = int(os.environ["RANK"])
HERE = pathlib.Path(__file__).parent

def tell(name, text=""):
    (HERE / "new").mkdir(exist_ok=True)
    (HERE / "new" / f"{name}.{RANK}").write_text(text)
    os.replace(HERE / "new" / f"{name}.{RANK}", HERE / f"{name}.{RANK}")

def await_file(name):
    while not (HERE / name).exists():
        time.sleep(0.01)

def serve_until(number):
    signal.signal(number, lambda *_: (tell("stopped"), sys.exit(0)))
    tell("ready", str(os.getpid()))
    while True:
        time.sleep(60)
"""

pytestmark = pytest.mark.distributed


@pytest.fixture
def start(tmp_path):
    """Starts run_local.sh with a program of the given text; whatever is left is killed."""
    started = []

    def start_job(body, *options, flags=(), **keywords):
        program = tmp_path / "program.py"
        program.write_text(PRELUDE + textwrap.dedent(body))
        command = [ROOT / "scripts" / "run_local.sh", *options, "--program", program, "--", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, **pipes, **keywords))
        return started[-1]

    yield start_job
    for process in started:
        process.kill()
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path / "program.py") in (process.info["cmdline"] or ()):
            process.kill()
    for process in started:
        process.communicate()


def exit_code(process):
    """Waits for the job; its output must hold no traceback."""
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return process.returncode


def await_files(directory, *names):
    while not all((directory / name).exists() for name in names):
        time.sleep(0.01)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_ranks_meet_in_a_store_that_outlives_rank_0(start, tmp_path):
    body = """
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(2 ** RANK)])
    dist.all_reduce(total)
    tell("total", str(total.item()))
    dist.destroy_process_group()
    if RANK == 0:
        sys.exit(0)
    await_file("go")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    store.set(f"key{RANK}", f"value{RANK}")
    tell("peer", store.get(f"key{3 - RANK}").decode())
    """
    process = start(body, "-n", "3")
    await_files(tmp_path, "total.0", "total.1", "total.2")
    launcher = psutil.Process(process.pid)
    while len(launcher.children()) > 2:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert exit_code(process) == 0
    assert [(tmp_path / f"total.{rank}").read_text() for rank in range(3)] == ["7.0"] * 3
    assert [(tmp_path / f"peer.{rank}").read_text() for rank in (1, 2)] == ["value2", "value1"]


def test_flags_output_and_environment_reach_the_ranks_unchanged(start, tmp_path):
    body = """
    tell("argv", json.dumps(sys.argv[1:]))
    tell("session", str(os.getsid(0)))
    if RANK == 2:
        sys.stdout.write("out: \\x1b[1m%\\n")
        sys.stderr.write("err\\n")
    """
    flags = ("--lr", "1e-3", "--", "two words", "")
    process = start(body, "-n", "2", "-s", "1", flags=flags)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "out: \x1b[1m%\n", "err\n")
    assert all(
        json.loads((tmp_path / f"argv.{rank}").read_text()) == list(flags) for rank in range(3)
    )
    sessions = {int((tmp_path / f"session.{rank}").read_text()) for rank in range(3)}
    assert len(sessions - {os.getsid(0)}) == 3  # a terminal's Ctrl-C does not reach them


def test_a_log_directory_gets_one_file_per_rank_and_keeps_what_was_there(start, tmp_path):
    body = 'print("rank", RANK); print("error", RANK, file=sys.stderr)'
    for _ in range(2):
        process = start(body, "-n", "2", "--log-dir", tmp_path / "logs")
        assert process.communicate(timeout=60) == ("", "")
    texts = {file.name: file.read_text() for file in (tmp_path / "logs").iterdir()}
    assert texts == {f"rank_{rank}.log": f"rank {rank}\nerror {rank}\n" * 2 for rank in range(2)}


def test_a_failing_rank_takes_the_others_down_and_names_the_exit_code(start, tmp_path):
    body = """
    if RANK == 0:
        serve_until(signal.SIGTERM)
    await_file("ready.0")
    sys.exit(7)
    """
    assert exit_code(start(body, "-n", "2")) == 7
    assert (tmp_path / "stopped.0").exists()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_time(start, tmp_path):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if RANK == 0:
        tell("ready", str(os.getpid()))
        time.sleep(600)
    await_file("ready.0")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert exit_code(start(body, "-n", "2", "--grace-s", "0.2")) == 128 + signal.SIGKILL
    assert gone(int((tmp_path / "ready.0").read_text()))


@pytest.mark.parametrize(
    ("options", "flags", "status", "expected"),
    [
        (("-n", "2", "-s", "1"), (), 0, 0),
        (("-n", "3"), ("--inprocess-restart",), 0, 128 + signal.SIGKILL),
        (("-n", "3"), ("--inprocess-restart",), 75, 75),
    ],
)
def test_with_spares_or_restart_a_killed_rank_leaves_the_others_alone(
    start, tmp_path, options, flags, status, expected
):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: tell("terminated"))
    if RANK == 1:
        await_file("ready.0"), await_file("ready.2")
        os.kill(os.getpid(), signal.SIGKILL)
    tell("ready", str(os.getpid()))
    await_file("go")
    sys.exit(STATUS)
    """
    process = start(body.replace("STATUS", str(status)), *options, flags=flags)
    await_files(tmp_path, "ready.0", "ready.2")
    launcher = psutil.Process(process.pid)
    while len(launcher.children()) > 2:  # until the launcher has seen the death
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert exit_code(process) == expected
    assert not list(tmp_path.glob("terminated.*"))


def test_the_others_learn_who_has_ended_and_the_launcher_why_they_stop(start, tmp_path):
    body = """
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 2:
        await_file("asks.0")
        sys.exit(7)
    from datetime import timedelta
    from torch.distributed import TCPStore
    from megatron_moevement.runtime.coordination import roll_call
    from megatron_moevement.settings.secret import Secret
    roll_call._END_PATIENCE_S = 300
    port = int(os.environ["MOEVEMENT_CONTROL_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    patience, secret = timedelta(seconds=300), Secret(os.environ["MOEVEMENT_SECRET"].encode())
    roll = roll_call.RollCall(0, 2, secret=secret, attempt="0", patience=patience)
    tell("called", json.dumps(roll.call(store)))
    tell("asks")
    tell("ends", json.dumps(roll.ends(store, [1, 2])))
    from megatron_moevement.runtime.coordination.generation import Loss
    roll.note_stop(store, "too few are left", [Loss(1, 0, "node8", "no progress")])
    roll.note_stop(store, "as others have noted", [])
    sys.exit(75)
    """
    events = ("--moevement-event-dir", "a folder")
    process = start(body, "-n", "1", "-s", "2", flags=events)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    *_, last = log_lines(errors)
    assert last.text.startswith(
        "the job ended with exit code 75: too few are left; rank 0 on node8 (process 1) was killed "
        f"by SIGKILL (no progress); process 2 on {last.host} ended with exit code 7 (it failed); 1 "
        "of 3 processes keep their state"
    )
    assert last.text.endswith(f"; `moevement report '{tmp_path}/a folder'` shows what happened")
    assert json.loads((tmp_path / "called.0").read_text()) == [0]
    ends = json.loads((tmp_path / "ends.0").read_text())
    assert ends == {"1": "was killed by SIGKILL", "2": "ended with exit code 7 (it failed)"}


def test_programs_get_the_end_of_the_job_alone_on_standard_output(start, tmp_path):
    body = """
    sys.stdout.write(f"of rank {RANK}\\n")  # at once: unbuffered, print writes in pieces
    sys.exit(7 * RANK)
    """
    process = start(body, "-n", "1", "-s", "1", "--json")
    output, errors = process.communicate(timeout=60)
    found = json.loads(output)
    assert (process.returncode, found["code"], found["end"]) == (0, 0, "ended with exit code 0")
    assert {one["process"]: one["code"] for one in found["processes"]} == {0: 0, 1: 7}
    assert (found["reason"], found["event_dir"], found["losses"]) == (None, None, [])
    assert {"of rank 0", "of rank 1"} <= set(errors.splitlines())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded_and_the_ranks_decide(start, tmp_path, number):
    process = start(f"serve_until({int(number)})", "-n", "2")
    await_files(tmp_path, "ready.0", "ready.1")
    process.send_signal(number)
    assert exit_code(process) == 0
    assert (tmp_path / "stopped.0").exists()
    assert (tmp_path / "stopped.1").exists()


def test_ranks_that_ignore_ctrl_c_are_killed_after_the_grace_time(start, tmp_path):
    body = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell("ready", str(os.getpid()))
    time.sleep(600)
    """
    process = start(body, "-n", "2", "--grace-s", "0.2")
    await_files(tmp_path, "ready.0", "ready.1")
    process.send_signal(signal.SIGINT)
    assert exit_code(process) == 128 + signal.SIGKILL


def test_a_stopped_rank_cleans_up_after_ctrl_c_too(start, tmp_path):
    process = start(f"serve_until({int(signal.SIGINT)})", "-n", "2")
    await_files(tmp_path, "ready.0", "ready.1")
    stopped = int((tmp_path / "ready.1").read_text())
    os.kill(stopped, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert exit_code(process) == 0
    assert (tmp_path / "stopped.1").exists()


def test_ranks_that_a_forwarded_signal_kills_give_its_code(start, tmp_path):
    process = start('tell("ready"); time.sleep(600)', "-n", "2")
    await_files(tmp_path, "ready.0", "ready.1")
    process.send_signal(signal.SIGTERM)
    assert exit_code(process) == 128 + signal.SIGTERM


def test_the_launcher_serves_metrics_until_the_job_ends(start, tmp_path):
    folder = tmp_path / "events"
    with EventLog(folder, 3, 2) as events:
        events.emit(EventName.ITERATION, 7)
    address = ("--metrics-address", "127.0.0.1:0")
    process = start(
        "await_file('go')", "-n", "1", *address, flags=("--moevement-event-dir", folder)
    )
    place = re.search(r"served at (http://127\.0\.0\.1:\d+/metrics)", process.stderr.readline())
    with urllib.request.urlopen(place[1], timeout=10) as answer:
        assert b"\nmoevement_committed_step 7.0\n" in answer.read()
    (tmp_path / "go").touch()
    assert exit_code(process) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(place[1], timeout=10)


def test_the_ranks_end_with_the_launcher(start, tmp_path):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("ready", str(os.getpid()))
    time.sleep(600)
    """
    process = start(body, "-n", "2")
    await_files(tmp_path, "ready.0", "ready.1")
    process.kill()
    process.wait()
    for rank in range(2):
        while not gone(int((tmp_path / f"ready.{rank}").read_text())):
            time.sleep(0.01)


@pytest.mark.parametrize("session", ["its own", "the rank's"])
def test_processes_that_a_rank_started_do_not_outlive_the_job(start, tmp_path, session):
    body = """
    import subprocess
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    own = OWN_SESSION
    tell("child", str(subprocess.Popen(["sleep", "600"], start_new_session=own, **quiet).pid))
    """
    body = body.replace("OWN_SESSION", str(session == "its own"))
    assert exit_code(start(body, "-n", "1")) == 0
    assert not psutil.pid_exists(int((tmp_path / "child.0").read_text()))


def test_two_pipeline_stages_train_and_one_rank_prints(tmp_path):
    flags = ["--moevement-backend", "cpu", "--model-preset", "tiny", "--mock-data"]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--lr", "1e-3"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "2"]
    flags += ["--pipeline-model-parallel-size", "2", "--log-interval", "1", "--eval-iters", "0"]
    command = [ROOT / "scripts" / "run_local.sh", "-n", "2", "--", *flags]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in log_lines(result.stdout) if " iteration " in line.text]
    assert [line.text.split()[3] for line in lines] == ["1/", "2/"]
    assert {(line.place, line.program) for line in lines} == {("rank 1", "pretrain_moe.py")}
    assert all(line.text.startswith(" [") for line in lines), "Megatron-LM's text is whole"


def test_the_command_is_the_launcher(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.argv[1:]); sys.exit(75)")
    command = [sys.executable, "-m", "megatron_moevement.cli", "launch", "-n", "1"]
    command += ["--program", program, "--", "--a", "--", "-n", "b"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 75
    assert result.stdout == "['--a', '--', '-n', 'b']\n"
    (line,) = log_lines(result.stderr)
    assert (line.place, line.level, line.program) == ("launcher", "ERROR", "moevement launch")
    assert line.text.startswith("the job ended with exit code 75")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-n", "1", "--program", "missing.py"), "no program at missing.py"),
        (("-n", "1", "--program", __file__, "--log-dir", __file__), "--log-dir"),
        (("-n", "0"), "-n must be at least 1"),
        (("--ranks", "x"), "invalid int value"),
        ((), "required"),
    ],
)
def test_bad_arguments_end_with_code_2_and_one_line(tmp_path, options, message):
    command = [ROOT / "scripts" / "run_local.sh", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
