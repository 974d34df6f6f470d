# SPDX-License-Identifier: Apache-2.0
"""`moevement check`: exit code 2 and a line for each thing that keeps a job from working."""

import json

import pytest

from megatron_moevement.cli import main
from megatron_moevement.policy.preflight.published import PUBLISHED
from tests.harness.bad_input import only_line, run_tiny, small_disk
from tests.harness.foreseen import checked
from tests.harness.tiny_job import PLAIN, TINY

pytestmark = pytest.mark.distributed

JOB = (
    *TINY,
    "--use-distributed-optimizer",
    "--bf16",
    "--moevement-strategy=moevement",
    "--moevement-window=2",
    "--moevement-replicas=1",
)
NODE = "--failure-domain=process"
"""Of a job on one machine, as run_local.sh starts it."""


def check(server, *arguments, flags=()):
    """Returns exit code, output and lines of errors of the command."""
    ended = checked(server, [*arguments, "--", *JOB, *flags])
    return ended.value, ended.stdout, ended.stderr.splitlines()


def test_a_job_that_works_is_shown_on_one_screen(megatron_fork_server, shared_memory):
    store = f"--moevement-store-dir={shared_memory}/store"
    code, out, err = check(megatron_fork_server, "-n", "2", NODE, flags=[store])
    assert (code, err) == (0, [])
    assert out.splitlines()[-1] == "nothing stands in the way of this job"
    assert len(out.splitlines()) < 24
    assert "predicted W: bandwidths are measured where the job's launcher starts" in out
    assert "W = 2: an iteration captures " in out
    assert "replays at most 3 steps" in out
    (titles,) = (line for line in out.splitlines() if line.startswith("node, "))
    columns = "node, MB own X log Y copies journal model host in files reserve"
    assert " ".join(titles.split()) == columns
    assert not (shared_memory / "store").exists()


def test_w_is_predicted_by_bandwidths_that_are_given(megatron_fork_server):
    given = ["--iteration-time=2", "--bandwidth=1e-3", "--network-bandwidth=1e-4"]
    flags = ["--moevement-window=auto", "--moevement-max-window=3"]
    code, out, _ = check(megatron_fork_server, "-n", "2", NODE, "--json", *given, flags=flags)
    assert code == 0
    found = json.loads(out)
    assert (found["window"], found["limits"], found["replayed_steps"]) == (3, [1, 3], 5)
    code, out, _ = check(megatron_fork_server, "-n", "2", NODE, flags=flags)
    assert "W = 3, later 1 to 3: an iteration captures " in out
    assert "a recovery replays at most 5 steps" in out
    prediction = found["prediction"]
    one, two, three = prediction["windows"]
    assert one["slot_bytes"] > two["slot_bytes"] > three["slot_bytes"]
    # A copy for one holder, which has the network for itself.
    assert [each["hiding_s"] for each in (one, two, three)] == [
        each["slot_bytes"] / 1e5 for each in (one, two, three)
    ]
    assert prediction["chosen"] in {1, 2, 3}


def test_a_model_with_few_operators_needs_no_flag_of_windows(megatron_fork_server):
    flags = [*PLAIN, "--num-layers=1", "--train-iters=100", "--moevement-replicas=1"]
    flags += ["--moevement-strategy=moevement"]
    ended = checked(
        megatron_fork_server, ["-n", "2", NODE, "--json", "--bandwidth=1", "--", *flags]
    )
    assert (ended.value, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert (found["window"], found["limits"]) == (3, [1, 8])
    assert len(found["prediction"]["windows"]) == 8


def test_a_script_of_megatron_lm_is_checked_as_it_is(megatron_fork_server, tmp_path):
    (tmp_path / "job.yaml").write_text("use_flash_attn: true\nmodel_parallel: {bf16: true}\n")
    flags = ["--log-energy", "--context-parallel-size", "1", f"--yaml-cfg={tmp_path}/job.yaml"]
    code, out, err = check(megatron_fork_server, "-n", "2", NODE, flags=flags)
    assert (code, err) == (0, [])
    assert "without an effect here: --use-flash-attn, --log-energy\n" in out
    code, _, (line,) = check(megatron_fork_server, NODE, flags=["--fp8-format", "hybrid"])
    assert code == 2
    assert "FP8 and FP4 (--fp8-format hybrid)" in line


def test_everything_is_there_as_json(megatron_fork_server):
    code, out, _ = check(megatron_fork_server, "-n", "3", "--spares=1", NODE, "--json")
    assert code == 2  # spares without restart in place: refused as the job refuses it
    flags = ["--inprocess-restart", "--inprocess-soft-timeout=30"]
    code, out, err = check(
        megatron_fork_server, "-n", "3", "--spares=1", NODE, "--json", flags=flags
    )
    assert (code, err) == (0, [])
    found = json.loads(out)
    assert (found["ranks"], found["window"], found["replayed_steps"]) == (2, 2, 3)
    assert found["limits"] == [2, 2]
    assert found["replicas"] == {"wanted": 1, "possible": 1, "domains": 3}
    assert found["timeouts_s"]["soft_timeout"] == 30
    first, second, spare = found["processes"]
    assert (first["rank"], second["rank"], spare["rank"]) == (
        "pp0.dp0.tp0.cp0.ep0",
        "pp0.dp1.tp0.cp0.ep0",
        None,
    )
    # A copy of each rank's slots lies in the memory of one of the other processes.
    own = [one["own_slots_bytes"] for one in found["processes"]]
    held = [one["held_slots_bytes"] for one in found["processes"]]
    assert sum(held) == sum(own)
    assert own == [max(own), max(own), 0]
    # A spare prepares slots of its own, and as many copies as any process keeps: what it has may be
    # a copy of the rank that it gets.
    assert (held[2], spare["reserve_bytes"]) == (max(own), max(own) + max(held))
    for one in found["processes"]:
        parts = ("own_slots_bytes", "held_slots_bytes", "logs_bytes", "ledger_bytes")
        assert one["total_bytes"] == sum(one[part] for part in parts)
    host_bytes = sum(one["total_bytes"] + one["state_bytes"] for one in found["processes"])
    assert found["nodes"]["0"]["host"] == host_bytes
    assert found["machine"]["addresses"] == ["127.0.0.1"] * 3


def test_the_copy_of_a_save_beside_training_is_host_memory(megatron_fork_server, tmp_path):
    size = ["-n", "3", "--spares=1", NODE, "--json"]
    flags = ["--inprocess-restart", f"--save={tmp_path}"]
    found = [
        json.loads(check(megatron_fork_server, *size, flags=[*flags, *more])[1])
        for more in ([], ["--async-save"])
    ]
    without, beside = ([one["saving_bytes"] for one in each["processes"]] for each in found)
    assert without == [0, 0, 0]
    assert beside[0] % (2 + 3 * 4) == 0  # weight, master and moments of each parameter
    assert beside[0] > 0
    assert beside[1:] == [0, 0]  # a replica, and a process without a rank
    nodes = [each["nodes"]["0"] for each in found]
    assert "saves" not in nodes[0]
    assert nodes[1]["saves"] == sum(beside)
    assert nodes[1]["host"] - nodes[0]["host"] == sum(beside)


OBSTACLES = {
    "too few domains": (["-n", "2"], [], "--moevement-replicas 1 needs 2 failure domains"),
    "one domain by name": (
        ["-n", "2", NODE],
        ["--moevement-failure-domain=rack"],
        "--moevement-replicas 1 needs 2 failure domains, there are 1",
    ),
    "more slots than operators": (
        ["-n", "2", NODE],
        ["--moevement-window=20", "--train-iters=100"],
        "of its slots would be empty",
    ),
    "no window is ever persisted": (["-n", "2", NODE], ["--train-iters=1"], "persisted at step 2"),
    "a limit": (
        ["-n", "2", NODE],
        ["--moevement-host-memory-limit-gb=0.0001"],
        "--moevement-host-memory-limit-gb: process ",
    ),
    "loopback between nodes": (
        ["--nodes=2"],
        [],
        "process 0 receives copies at 127.0.0.1, which its own machine alone reaches",
    ),
    "no such interface": (
        ["-n", "2", NODE],
        ["--moevement-replication-interface=ib{local_rank}"],
        "ib0",
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_stands_in_the_way_ends_with_exit_code_2(megatron_fork_server, name):
    arguments, flags, words = OBSTACLES[name]
    code, out, (line,) = check(megatron_fork_server, *arguments, flags=flags)
    assert code == 2
    assert line.startswith("moevement check: ")
    assert words in line
    assert "nothing stands in the way" not in out
    assert "own X" in out


def test_nodes_elsewhere_are_not_compared_with_this_machine(megatron_fork_server):
    flags = ["--moevement-backend=cuda", "--moevement-replication-interface=ib0"]
    code, out, err = check(megatron_fork_server, "--nodes=2", "--elsewhere", flags=flags)
    assert (code, err) == (0, [])
    assert "this machine" not in out
    assert "device" in out  # and no model in host memory
    assert " model " not in out


def test_a_small_file_system_is_too_small_by_what_the_files_lack(megatron_fork_server, tmp_path):
    flags = [f"--moevement-store-dir={tmp_path}/store"]
    _, out, _ = check(megatron_fork_server, "-n", "2", NODE, "--json", flags=flags)
    needed = sum(one["file_bytes"] for one in json.loads(out)["processes"])
    with small_disk(tmp_path, needed // 2):
        code, _, (line,) = check(megatron_fork_server, "-n", "2", NODE, flags=flags)
    assert code == 2
    assert f"{tmp_path}/store: node 0 needs {needed} bytes there, and " in line


@pytest.mark.parametrize(
    "flag",
    [
        "--no-such-flag",
        "--moevement-window=0",
        "--num-experts=3",
        "--moevement-recover-only",
        "--context-parallel-size=2",
    ],
)
def test_bad_flags_are_refused_as_the_job_refuses_them(megatron_fork_server, flag):
    flags = [flag, "--expert-model-parallel-size=2"]
    code, out, err = check(megatron_fork_server, "-n", "2", flags=flags)
    assert (code, out) == (2, "")
    argv = [*JOB[len(TINY) :], *flags]
    result = megatron_fork_server.run(run_tiny, world_size=2, args=[argv], timeout_s=30).check()
    refused = only_line("".join(rank.stderr for rank in result.ranks))
    assert "".join(err).removeprefix("moevement check: ") == refused.removeprefix(
        "pretrain_moe.py: "
    )


def test_a_job_that_nothing_protects_is_no_job_to_look_at(megatron_fork_server):
    code, _, (line,) = check(megatron_fork_server, flags=["--moevement-strategy=off"])
    assert code == 2
    assert "--moevement-strategy off: nothing protects the job" in line


@pytest.mark.parametrize("sizes", [["--nodes=0"], ["-n=0"], ["-n=2", "--spares=2"]])
def test_a_cluster_without_ranks_is_refused(megatron_fork_server, sizes):
    code, out, err = check(megatron_fork_server, *sizes)
    assert (code, out, len(err)) == (2, "", 1)


def test_a_number_of_nodes_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "many")
    with pytest.raises(SystemExit, match="2"):
        main(["check"])
    assert "argument --nodes: invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_jobs_of_the_paper_are_shown_beside_its_figures(megatron_fork_server):
    """Each is of 96 ranks: about half a minute of one core."""
    ended = checked(megatron_fork_server, ["--paper", "--json"], timeout_s=600)
    rows = json.loads(ended.stdout)
    assert [row["model"] for row in rows] == [one.preset for one in PUBLISHED]
    for row in rows:
        assert row["copies"] == pytest.approx(2 * row["X"])
        assert row["host"] == pytest.approx(row["X"] + row["Y"] + row["copies"], rel=1e-3)
        assert row["worst node"] < 1
        if row["paper X"] is not None:
            # A ring of 2 W + 1 slots, each as large as the largest, beside two windows.
            assert row["paper X"] < row["X"] < 2 * row["paper X"]
            assert row["paper Y"] < row["Y"]
