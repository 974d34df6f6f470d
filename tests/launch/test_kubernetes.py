# SPDX-License-Identifier: Apache-2.0
"""`scripts/kubernetes.yaml` gives processes what the launcher does, and its commands train."""

import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from megatron_moevement.cli import build_parser as build_command
from megatron_moevement.cli.launch import Job, StorePorts, rank_environment
from megatron_moevement.policy.job.guarantee import deciding_variables
from megatron_moevement.training.arguments import build_parser
from tests.harness.tiny_job import TINY

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    (each["kind"], each["metadata"]["name"]): each
    for each in yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text("utf-8"))
}
STORES = DOCUMENTS["Pod", "moevement-stores"]["spec"]["containers"][0]
JOB = DOCUMENTS["Job", "moevement"]["spec"]
RANKS = JOB["template"]["spec"]["containers"][0]
ENVIRONMENT = {one["name"]: one.get("value") for one in RANKS["env"]}
SHELL, IN_SHELL, SCRIPT, NAME = RANKS["command"]
OF_THE_MACHINE = {"OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"}
"""What one machine's launcher sets besides: for its cores, and for a quiet log."""


def given_by_the_launcher():
    """Returns the variables of processes with in-process restart under `moevement launch`."""
    job = Job(1, 1, ROOT / "pretrain_moe.py", ("--inprocess-restart",), timedelta(0), None)
    names = rank_environment(job, 0, StorePorts(1, 2), "secret", {}).keys() - OF_THE_MACHINE
    return {*names, "MOEVEMENT_LAUNCH"}


def test_a_process_has_the_variables_that_the_launcher_would_set():
    assert given_by_the_launcher() - ENVIRONMENT.keys() <= {"RANK", "LOCAL_RANK"}
    assert {*re.findall(r"\b(RANK|LOCAL_RANK)=", SCRIPT)} == {"RANK", "LOCAL_RANK"}


def test_every_other_variable_is_used():
    others = ENVIRONMENT.keys() - given_by_the_launcher()
    decide = deciding_variables(dict.fromkeys(others, ""))
    assert {name for name in others if f"${name}" not in SCRIPT} - decide.keys() == {
        "CUDA_DEVICE_MAX_CONNECTIONS"
    }


def test_its_numbers_fit_together():
    processes, local = int(ENVIRONMENT["WORLD_SIZE"]), int(ENVIRONMENT["LOCAL_WORLD_SIZE"])
    pods = JOB["completions"]
    assert (processes, JOB["parallelism"]) == (pods * local, pods)
    assert RANKS["resources"]["limits"]["nvidia.com/gpu"] == local
    stores = build_command(["stores"]).parse_args(["stores", *STORES["args"]])
    assert stores.processes == processes
    assert [stores.port, stores.port + 1] == [
        int(ENVIRONMENT[name]) for name in ("MASTER_PORT", "MOEVEMENT_CONTROL_PORT")
    ]
    spare = processes - int(ENVIRONMENT["MOEVEMENT_ACTIVE_RANKS"])
    assert spare == local, "a node's worth"
    assert ("Service", ENVIRONMENT["MASTER_ADDR"]) in DOCUMENTS


def test_its_flags_are_those_of_the_programs():
    values, unknown = build_parser().parse_known_args(RANKS["args"])
    assert unknown == []
    assert values.inprocess_restart


@pytest.mark.parametrize("port", ["", "9464"])
def test_the_pod_of_the_stores_serves_metrics_where_it_is_given_a_port(tmp_path, port):
    (tmp_path / "moevement").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "moevement").chmod(0o755)
    default = next(one["value"] for one in STORES["env"] if one["name"] == "METRICS_PORT")
    assert default == ""
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_IP": "10.0.0.7"}
    done = subprocess.run(
        [*STORES["command"], "--port", "29500"],
        env=environment | {"METRICS_PORT": port},
        capture_output=True,
        text=True,
        check=True,
    )
    events = next(
        one.partition("=")[2] for one in RANKS["args"] if one.startswith("--moevement-event-dir")
    )
    metrics = ["--metrics-address", f"10.0.0.7:{port}", "--event-dir", events] if port else []
    assert done.stdout.splitlines() == ["stores", "--port", "29500", *metrics]
    volume = events.split("/")[1]
    (mount,) = STORES["volumeMounts"]
    assert (mount["name"], mount["mountPath"]) == (volume, f"/{volume}")


def test_the_page_has_the_variables_that_processes_read():
    settings = [
        ROOT / "megatron_moevement" / "settings" / name for name in ("launch.py", "secret.py")
    ]
    read = {
        name
        for path in settings
        for name in re.findall(r'"([A-Z]+(?:_[A-Z]+)*)"', path.read_text("utf-8"))
    }
    page = (ROOT / "docs" / "operate" / "launchers.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[A-Z].*?) \|", page, re.MULTILINE)
    shown = {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)}
    assert shown == read | given_by_the_launcher()


def environment_of(pod, folder, **variables):
    """Returns the environment of a pod of a job with a process each, all on this machine."""
    return {
        **os.environ,
        **{name: value or name for name, value in ENVIRONMENT.items()},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "JOB_COMPLETION_INDEX": str(pod),
        "MOEVEMENT_FAILURE_DOMAIN": f"node{pod}",
        "POD_IP": "127.0.0.1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "MOEVEMENT_ACTIVE_RANKS": "2",
        **variables,
    }


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_process_of_a_pod_is_killed_and_the_others_go_on(tmp_path, shared_memory):
    flags = [
        *(*TINY, "--pipeline-model-parallel-size=2", "--moevement-backend=cpu", "--train-iters=12"),
        *("--moevement-strategy=moevement", "--inprocess-restart", "--moevement-window=2"),
        *(
            f"--moevement-store-dir={shared_memory}/store",
            f"--moevement-event-dir={tmp_path}/events",
        ),
        "--untie-embeddings-and-output-weights",
        "--moevement-faults=kill:9:backward@1",
    ]
    secret = {"MOEVEMENT_SECRET": "s" * 64, "MOEVEMENT_LAUNCH": "launch"}
    stores = subprocess.Popen(
        [*STORES["command"], "--interface", "127.0.0.1"],
        env=environment_of(0, tmp_path, **secret),
        stdout=subprocess.PIPE,
        text=True,
    )
    pods = []
    try:
        served = dict(pair.split("=") for pair in stores.stdout.readline().split())
        variables = (
            secret | served | {"MASTER_ADDR": "localhost", "MOEVEMENT_STORE_ADDR": "localhost"}
        )
        pods = [
            subprocess.Popen(
                [SHELL, IN_SHELL, SCRIPT, NAME, *flags],
                cwd=ROOT,
                env=environment_of(pod, tmp_path, **variables),
                start_new_session=True,
            )
            for pod in range(3)
        ]
        codes = [pod.wait(240) for pod in pods]
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
        stores.send_signal(signal.SIGTERM)
        stores.wait(20)
        stores.stdout.close()
    assert codes == [0, 1, 0]
    command = [
        sys.executable,
        "-m",
        "megatron_moevement.cli",
        "recoveries",
        tmp_path / "events",
        "--json",
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert [one["verdict"] for one in found["recoveries"]] == ["LOCALIZED"]
