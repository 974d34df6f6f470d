# SPDX-License-Identifier: Apache-2.0
"""`moevement check` as all processes of a launch: links are measured, who is missing is named."""

import json
import socket

import pytest

from megatron_moevement.cli import check_links
from megatron_moevement.errors import UserError
from megatron_moevement.policy.preflight.forecast import Cluster
from megatron_moevement.settings.launch import Launch
from tests.harness.foreseen import run_check
from tests.harness.tiny_job import TINY

JOB = (
    *TINY,
    "--use-distributed-optimizer",
    "--bf16",
    "--moevement-strategy=moevement",
    "--moevement-window=2",
    "--moevement-replicas=2",
)
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MOEVEMENT_ACTIVE_RANKS")


def launched(server, processes, *arguments, flags=(), **env):
    """Returns how each process of a launch ended."""
    argv = [*arguments, "--", *JOB, *flags]
    result = server.run(run_check, world_size=processes, args=[argv], timeout_s=60, env=env)
    return result.check().ranks


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return str(taken.getsockname()[1])


@pytest.mark.distributed
@pytest.mark.parametrize("serves_store", [True, False], ids=["as run_local.sh", "as torchrun"])
def test_all_pairs_that_copies_go_between_are_measured(megatron_fork_server, serves_store):
    env = {}
    if not serves_store:
        env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": free_port()}
        env["MOEVEMENT_SECRET"] = ""
    first, *others = launched(megatron_fork_server, 3, "--json", "--iteration-time=30", **env)
    assert (first.value, first.stderr) == (0, "")
    assert [(each.value, each.stdout, each.stderr) for each in others] == [(0, "", "")] * 2
    found = json.loads(first.stdout)
    # Each is a failure domain, so both others keep copies of its slots.
    pairs = {(one["sender"], one["holder"]) for one in found["links"]["sent"]}
    assert pairs == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}
    slowest = min(one["bytes_per_s"] for one in found["links"]["sent"])
    to_host = [one["to_host_bytes_per_s"] for one in found["links"]["processes"].values()]
    rates = {"to_host_bytes_per_s": min(to_host), "to_holder_bytes_per_s": slowest}
    assert found["prediction"]["rates"] == rates
    assert found["replicas"] == {"wanted": 2, "possible": 2, "domains": 3}
    # Slots of some hundred kB in iterations of half a minute.
    assert found["prediction"]["chosen"] == 1
    assert [one["window"] for one in found["prediction"]["windows"]] == list(range(1, 9))


@pytest.mark.distributed
def test_a_process_that_never_comes_is_named_with_its_node(megatron_fork_server):
    env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MOEVEMENT_ACTIVE_RANKS": "4"}
    ends = launched(
        megatron_fork_server, 3, "--patience-s=3", flags=["--global-batch-size=16"], **env
    )
    assert [each.value for each in ends] == [2, 2, 2]
    (line,) = ends[0].stderr.splitlines()
    assert line.startswith("moevement check: no sign of life within 3 s of process 3 of 4 (node 1)")
    assert [(each.stdout, each.stderr) for each in ends[1:]] == [("", "")] * 2


@pytest.mark.distributed
def test_what_another_process_refuses_process_0_says(megatron_fork_server):
    interfaces = "--moevement-replication-interface=127.0.0.1,no-such-interface.invalid"
    ends = launched(megatron_fork_server, 2, flags=["--moevement-replicas=1", interfaces])
    assert [each.value for each in ends] == [2, 2]
    assert [each.stdout for each in ends] == ["", ""]
    (line,) = ends[0].stderr.splitlines()
    assert line.startswith("moevement check: process 1: --moevement-replication-interface no-such")
    assert ends[1].stderr == ""


@pytest.fixture
def environment(monkeypatch):
    """Returns what sets the variables of a launcher, and no others."""
    for name in (*VARIABLES, "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)

    def set_to(*values):
        for name, value in zip(VARIABLES, values, strict=False):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")

    return set_to


def test_a_launch_says_how_large_the_job_is(environment, monkeypatch):
    assert not check_links.is_launched()
    assert check_links.launched_sizes() == ("1", "1", "0")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "7")
    assert check_links.launched_sizes() == ("7", "1", "0")
    environment("0", "1")
    assert not check_links.is_launched()  # it has no links
    environment("3", "16", "8", "14")
    assert check_links.is_launched()
    assert check_links.launched_sizes() == ("2", "8", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("MOEVEMENT_ACTIVE_RANKS")
    assert check_links.launched_sizes() == ("1", "16", "0")


def test_another_size_than_that_of_the_launch_is_refused(environment):
    environment("3", "16", "8", "14")
    check_links.check_sizes(Cluster(2, 8, 2), Launch.from_environment())
    with pytest.raises(UserError, match=r"--nodes 3 with 8 processes each, and .* started 16"):
        check_links.check_sizes(Cluster(3, 8, 2), Launch.from_environment())
