# SPDX-License-Identifier: Apache-2.0
"""`scripts/run_ft_launcher.sh` around an agent that stands in for `ft_launcher`."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.runtime.observation.process_events import Child, tell_end

ROOT = Path(__file__).resolve().parents[2]
AGENT = """#!/bin/bash
while [ "$1" != --no-python ]; do shift; done
shift
export TORCHELASTIC_RUN_ID=run RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1
"$@"
echo "the rank ended with $?"
exit 7
"""
PROGRAM = """
import os, sys, urllib.request
_, end, *arguments = sys.argv
if "--metrics" in arguments:
    with urllib.request.urlopen(arguments[-1], timeout=20) as answer:
        sys.stdout.write(answer.read().decode())
sys.stdout.flush()
sys.exit(int(end)) if int(end) >= 0 else os.kill(os.getpid(), -int(end))
"""


@pytest.fixture
def start(tmp_path):
    """Runs a copy of the script with arguments; returns its code and its lines."""
    (tmp_path / "bin").mkdir()
    python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    for name, text in (("ft_launcher", AGENT), ("python3", python)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "pretrain_moe.py").write_text(PROGRAM)
    (tmp_path / "events").mkdir()
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "run_ft_launcher.sh", tmp_path / "scripts")
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    def run(*arguments):
        command = ["bash", script, *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        return done.returncode, (done.stdout + done.stderr).splitlines()

    return run


@pytest.mark.parametrize(
    ("end", "in_shell", "recorded"),
    [("-9", 137, [-9]), ("3", 3, [3]), ("0", 0, []), ("130", 130, [])],
)
def test_how_a_rank_ended_is_among_its_events_and_the_agents_code_is_the_scripts(
    start, tmp_path, end, in_shell, recorded
):
    events = f"--moevement-event-dir={tmp_path / 'events'}"
    code, lines = start("-n", "2", "--", end, events)
    assert code == 7, "\n".join(lines)
    assert f"the rank ended with {in_shell}" in lines
    ends = read_events(tmp_path / "events")
    assert [one.event for one in ends] == [EventName.PROCESS_END] * len(recorded)
    assert [one.fields["code"] for one in ends] == recorded
    for one in ends:
        assert (one.fields["launch"], one.fields["process"]) == ("run:127.0.0.1:1", 1)
        assert one.fields["started_s"] < one.time


@pytest.mark.parametrize("name", ["--moevement-event-dir", None])
def test_what_hosts_the_stores_serves_metrics_where_an_address_is_given(start, tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tell_end(str(tmp_path / "events"), Child("before", 0, None, 1.0), 1)  # what is served
    flags = ["0", "--inprocess-restart", *([name, str(tmp_path / "events")] if name else [])]
    url = f"http://{address}/metrics"
    code, lines = start(*("-n", "1", "--metrics-address", address, "--", *flags, "--metrics", url))
    if name is None:
        assert code == 2
        assert "give the job --moevement-event-dir" in "\n".join(lines)
        return
    assert code == 7, "\n".join(lines)
    assert "the rank ended with 0" in lines
    assert any(line.startswith("moevement_") for line in lines)


def test_metrics_are_refused_where_no_store_is_hosted(start):
    code, lines = start("-n", "2", "--metrics-address", "127.0.0.1:9464", "--", "0")
    assert code == 2
    assert lines == ["run_ft_launcher.sh: --metrics-address needs --inprocess-restart"]
