# SPDX-License-Identifier: Apache-2.0
"""A rank under a real rank monitor of nvidia-resiliency-ext, which kills it when it hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(100)]

PREPARE = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer
from megatron_moevement.errors import UserError
from megatron_moevement.runtime.observation.watch import Moment, Section
from megatron_moevement.settings.rank_monitor import RankMonitoring
from megatron_moevement.settings.restart import InProcessRestart

folder = Path(sys.argv[1])
socket = str(folder / "monitor.socket")
os.environ |= {"FT_RANK_MONITOR_IPC_SOCKET": socket, "RANK": "0", "LOCAL_RANK": "0"}


def serve(**limits):
    config = FaultToleranceConfig(
        workload_check_interval=0.05, enable_nic_monitor=False, log_level="ERROR", **limits
    )
    context = torch.multiprocessing.get_context("fork")
    return RankMonitorServer.run_in_subprocess(config, socket, mp_ctx=context)


def watch(*, learns=False, **restart):
    from megatron_moevement.integrations.nvrx.rank_monitor import RankMonitor
    settings = RankMonitoring(True, learns, ft_num_warmup_iters=0)
    return RankMonitor(settings, InProcessRestart(**restart), str(folder))


def hang():
    time.sleep(0.3)  # what was said before is on its way
    while True:  # a monitor continues a rank before it kills it
        os.kill(os.getpid(), signal.SIGSTOP)


def steps(watch, count):
    for _ in range(count):
        watch.begin_step()
        watch.end_step()


"""


@pytest.fixture
def rank(tmp_path):
    """Runs a rank; returns how it ended, and what it said."""

    def run(program):
        out, err = tmp_path / "out", tmp_path / "err"
        with (
            out.open("w") as said,
            err.open("w") as complaints,
            subprocess.Popen(
                [sys.executable, "-c", PREPARE + program, tmp_path],
                stdout=said,
                stderr=complaints,
                start_new_session=True,
            ) as process,
        ):
            try:
                code = process.wait(30)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its monitor outlives it
        return code, out.read_text().splitlines(), err.read_text()

    return run


@pytest.mark.parametrize(
    ("limits", "hang"),
    [
        pytest.param(
            "rank_heartbeat_timeout=0.5",
            "steps(watched, 3)",
            id="heartbeat",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rank_section_timeouts={'step': 0.5}",
            "steps(watched, 3); watched.begin_step()",
            id="section",
        ),
    ],
)
def test_a_rank_that_hangs_is_killed_by_its_monitor(rank, limits, hang):
    code, said, complaints = rank(f"""
serve({limits})
watched = watch()
watched.restart()
time.sleep(1)
print("the set-up may take longer", flush=True)
{hang}
hang()
""")
    assert (code, said) == (-signal.SIGKILL, ["the set-up may take longer"]), complaints


@pytest.mark.slow
def test_a_rank_that_restarts_in_place_begins_its_set_up_anew_and_leaves_in_peace(rank):
    code, said, complaints = rank("""
monitor = serve(rank_section_timeouts={"setup": 30.0, "step": 0.5, "checkpointing": 30.0})
watched = watch()
watched.restart()
steps(watched, 3)
watched.begin_step()
watched.restart()
time.sleep(1)
steps(watched, 1)
watched.begin_save()
watched.end_save()
watched.close()
time.sleep(1)
print("done")
monitor.terminate()
""")
    assert (code, said) == (0, ["done"]), complaints
    assert "hears no more" not in complaints


@pytest.mark.slow
def test_limits_are_learned_told_to_the_monitor_and_kept_for_the_next_launch(rank, tmp_path):
    code, said, complaints = rank("""
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
serve(rank_section_timeouts={"step": 1000.0}, safety_factor=2.0)
watched = watch(learns=True)
watched.restart()
steps(watched, 15)
watched.begin_step(); time.sleep(0.5); watched.end_step()
watched.learn(Moment.SAVED, torch.device("cpu"))
print("learned", flush=True)
watched.begin_step()
hang()
""")
    assert (code, said) == (-signal.SIGKILL, ["learned"]), complaints
    learned = json.loads((tmp_path / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert learned["calculated_sections"] == ["step"]
    assert 1 <= learned["section"]["step"] < 1000
    code, said, complaints = rank("""
serve(rank_section_timeouts={"step": 1000.0})
watched = watch()
watched.restart()
watched.begin_step()
hang()
""")
    assert code == -signal.SIGKILL, complaints


def test_limits_that_do_not_fit_are_refused(rank):
    code, said, complaints = rank("""
def refused(limits, **restart):
    monitor = serve(**limits)
    try:
        watch(**restart)
    except UserError as error:
        print(error)
    monitor.terminate()
    monitor.join()

refused({"rank_section_timeouts": {"stpe": 9.0}})
refused({"rank_heartbeat_timeout": 100.0}, inprocess_restart=True)
refused({"rank_section_timeouts": {"step": 120.0}}, inprocess_restart=True)
""")
    assert code == 0, complaints
    too_short = "--inprocess-barrier-timeout 120 must be less than"
    assert [line.split(" of ft_launcher")[0] for line in said] == [
        "--ft-rank-section-timeouts",
        f"{too_short} --ft-rank-heartbeat-timeout",
        f"{too_short} the limit of step",
    ]
    assert "there is no section 'stpe'; there are setup, step, checkpointing" in said[0]


@pytest.mark.slow
def test_a_monitor_that_is_gone_is_told_about_and_stops_nobody(rank):
    code, said, complaints = rank("""
monitor = serve()
watched = watch()
watched.restart()
monitor.kill()
monitor.join()
steps(watched, 3)
watched.close()
print("done")
try:
    watch()
except UserError as error:
    print(error)
""")
    assert code == 0, complaints
    assert said[0] == "done"
    assert said[1].startswith("--enable-ft-package: the rank monitor does not answer: ")
    assert complaints.count("the rank monitor hears no more of this rank") == 1
