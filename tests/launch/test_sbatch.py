# SPDX-License-Identifier: Apache-2.0
"""The Slurm script up to the command that it hands to `srun`; no cluster is needed for that."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.runtime.observation.events import EventName, read_events
from tests.harness.log_lines import log_lines

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/sh
echo "$PYTHON" >"$RUN_DIR/python"
echo "$CUDA_DEVICE_MAX_CONNECTIONS" >"$RUN_DIR/connections"
case "$*" in
*" stores "*) echo "MASTER_ADDR=$MASTER_ADDR"; echo "$@" >"$RUN_DIR/served"; exec sleep 60 ;;
*)
    printf "%s\\n" "$@"
    for rank in $(seq 0 15); do
        echo "${CODE:-0}" >"$CODES/$rank"
        echo "node$((rank / 8 + 1))" >"$CODES/$rank.node"
    done
    [ -z "$LOST" ] || for rank in $(seq 8 15); do rm "$CODES/$rank"; done
    [ -z "$KILLED" ] || { echo 137 >"$CODES/$KILLED"; rm "$CODES/15"; }
    ;;
esac
"""


@pytest.fixture
def submit(tmp_path):
    """Runs the script as a job of Slurm; returns the arguments of `srun`."""
    nodes = "#!/bin/sh\nprintf '%s\\n' localhost node2\n"
    for name, text in (("srun", SRUN), ("scontrol", nodes), ("squeue", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments, code=0, **variables):
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURMD_NODENAME": "node1",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS": "16",
            "SLURM_NTASKS_PER_NODE": "8",
            "SLURM_CPUS_ON_NODE": "104",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "RUN_DIR": str(tmp_path / "a run"),
            "DATA_PATH": "/data/pile",
            "TOKENIZER_MODEL": "/data/tokenizer.json",
        }
        command = ["bash", ROOT / "scripts" / "train_moe.sbatch", *arguments]
        result = subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, check=False
        )
        assert result.returncode == code, result.stderr
        lines = list(log_lines(result.stderr))
        assert len(lines) == len(result.stderr.splitlines()), "each line is one of the log"
        assert {(one.host, one.place) for one in lines} <= {("node1", "batch")}
        run.levels = [one.level for one in lines]
        run.said = [f"{one.program}: {one.text}" for one in lines]
        return result.stdout.splitlines()

    return run


def repository(folder):
    """Makes a folder one that has been set up."""
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return folder


def test_every_flag_is_one_of_the_programs(submit):
    handed = submit()
    program = handed.index(str(ROOT / "pretrain_moe.py"))
    flags = {argument for argument in handed[program:] if argument.startswith("--")}
    command = [sys.executable, ROOT / "pretrain_moe.py", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert flags - set(help_text.replace(",", " ").split()) == set()
    assert len(flags) > 30


def test_a_bad_exit_of_one_task_is_left_to_the_others(submit):
    assert submit()[0] == "--kill-on-bad-exit=0"


def test_each_task_has_its_share_of_the_cores_and_all_memory_is_the_jobs(submit):
    def bound(**variables):
        handed = submit(**variables)
        return handed[handed.index("--cpus-per-task") : handed.index("bash")]

    block = ["--cpu-bind=cores", "--distribution=block:block"]
    assert bound() == ["--cpus-per-task", "12", *block]
    assert bound(SLURM_CPUS_ON_NODE="8")[1] == "1"
    flags = bound(SLURM_CPUS_PER_TASK="4", SRUN_FLAGS="--cpu-bind=none --hint=nomultithread")
    assert flags == ["--cpus-per-task", "4", *block, "--cpu-bind=none", "--hint=nomultithread"]
    text = (ROOT / "scripts" / "train_moe.sbatch").read_text()
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0"} <= set(text.splitlines())


def test_the_stores_are_served_by_the_first_node_beside_the_ranks(submit, tmp_path):
    submit()
    served = (tmp_path / "a run" / "served").read_text()
    assert served.startswith("--overlap --nodes 1 --ntasks 1 --nodelist localhost ")
    task = 'cli stores     --interface "$MASTER_ADDR" --port "$MASTER_PORT" --processes "$2"'
    assert task in served.replace("\\", "").replace("\n", "")


def test_the_stores_serve_metrics_where_a_port_is_given(submit, tmp_path):
    submit()
    assert "--metrics-address" not in (tmp_path / "a run" / "served").read_text().splitlines()[-1]
    submit(METRICS_PORT="9464")
    served = (tmp_path / "a run" / "served").read_text()
    events = tmp_path / "a run" / "events"
    assert served.endswith(f" 16 --metrics-address 127.0.0.1:9464 --event-dir {events}\n")
    assert '--processes "$2" "${@:3}"' in served


def test_streams_share_queues_as_megatron_asks_for_unless_told_otherwise(submit, tmp_path):
    submit()
    assert (tmp_path / "a run" / "connections").read_text() == "1\n"
    submit(CUDA_DEVICE_MAX_CONNECTIONS="32")
    assert (tmp_path / "a run" / "connections").read_text() == "32\n"


def test_flags_of_the_user_come_last_and_override(submit):
    assert submit("--train-iters", "5")[-2:] == ["--train-iters", "5"]


def test_a_container_is_used_when_one_is_named(submit, tmp_path):
    assert "--container-image" not in submit()
    handed = submit(CONTAINER_IMAGE="moevement")
    image = handed.index("--container-image")
    assert handed[image + 1] == "moevement"
    run = tmp_path / "a run"
    assert handed[image + 3] == f"{ROOT}:{ROOT},{run}:{run}"
    assert "/a:/b" in submit(CONTAINER_IMAGE="moevement", CONTAINER_MOUNTS="/a:/b")


def test_the_environment_of_the_repository_is_used_but_in_a_container(submit, tmp_path):
    chosen = tmp_path / "a run" / "python"
    for variables, python in (
        ({"REPOSITORY": str(repository(tmp_path))}, tmp_path / ".venv" / "bin" / "python"),
        ({"REPOSITORY": str(tmp_path), "CONTAINER_IMAGE": "moevement"}, "python"),
        ({"REPOSITORY": str(tmp_path / "elsewhere")}, "python"),
        ({"REPOSITORY": str(tmp_path), "PYTHON": "python3.12"}, "python3.12"),
    ):
        submit(**variables)
        assert chosen.read_text() == f"{python}\n"


def test_each_task_takes_its_rank_from_slurm(submit, tmp_path):
    handed = submit()
    start = handed.index("-c") + 1
    task = "\n".join(handed[start : handed.index("task")])
    shown = "env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MOEVEMENT)' | sort"
    script = task.replace('"$PYTHON" -u "$@"', shown)
    assert script != task
    slurm = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}
    slurm |= {"SLURM_NTASKS_PER_NODE": "8", "SLURMD_NODENAME": "node2", "CODES": str(tmp_path)}
    result = subprocess.run(
        ["bash", "-c", script], env=os.environ | slurm, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [
        "LOCAL_RANK=1",
        "LOCAL_WORLD_SIZE=8",
        "MOEVEMENT_FAILURE_DOMAIN=node2",
        "RANK=9",
        "WORLD_SIZE=16",
    ]
    assert (tmp_path / "9").read_text() == "0\n"


def test_the_end_of_a_killed_process_is_among_its_events(submit, tmp_path):
    handed = submit()
    script = "\n".join(handed[handed.index("-c") + 1 : handed.index("task")])
    events = tmp_path / "events"
    events.mkdir()
    (tmp_path / "program.py").write_text("import os, sys\nos.kill(os.getpid(), int(sys.argv[1]))\n")
    shutil.copytree(ROOT / "megatron_moevement", tmp_path / "megatron_moevement")
    variables = {"CODES": str(tmp_path), "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
    variables |= {"SLURM_LOCALID": "0"}
    variables |= {"PYTHON": sys.executable, "MOEVEMENT_LAUNCH": "77-0-1"}
    subprocess.run(
        [
            "bash",
            "-c",
            script,
            "task",
            tmp_path / "program.py",
            "9",
            f"--moevement-event-dir={events}",
        ],
        env=os.environ | variables,
        check=True,
    )
    assert (tmp_path / "2").read_text() == "137\n"
    (end,) = read_events(events)
    assert (end.event, end.fields["code"]) == (EventName.PROCESS_END, -9)
    assert (end.fields["launch"], end.fields["process"]) == ("77-0-1", 2)
    assert end.fields["started_s"] < end.time


def test_without_a_repository_the_installed_program_trains(submit, tmp_path):
    handed = submit(REPOSITORY=str(tmp_path))
    assert handed[handed.index("task") + 1] == "pretrain_moe"
    script = "\n".join(handed[handed.index("-c") + 1 : handed.index("task")])
    result = subprocess.run(
        ["bash", "-c", script.replace('"$PYTHON" -u', "echo"), "task", "pretrain_moe", "--seed"],
        cwd=tmp_path,
        env=os.environ | {"CODES": str(tmp_path), "SLURM_PROCID": "0", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{ROOT / 'pretrain_moe.py'} --seed\n"


def test_a_task_may_lock_as_much_memory_as_its_node_lets_it(submit, tmp_path):
    handed = submit()
    task = "\n".join(handed[handed.index("-c") + 1 : handed.index("task")])
    shown = task.replace('"$PYTHON" -u "$@"', "ulimit -Sl; ulimit -Hl")
    result = subprocess.run(
        ["bash", "-c", f"ulimit -Sl 64\n{shown}", "task"],
        env=os.environ | {"SLURM_PROCID": "0", "SLURM_NNODES": "1", "CODES": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    soft, hard = result.stdout.split()
    assert soft == hard != "64"


@pytest.mark.parametrize(
    ("nodes", "name", "given", "interface"),
    [
        ("2", "localhost", {}, "127.0.0.1"),
        ("2", "no-such-node.invalid", {}, None),
        ("2", "localhost", {"REPLICATION_INTERFACE": "ib{local_rank}"}, "ib{local_rank}"),
        ("1", "localhost", {"REPLICATION_INTERFACE": "ib{local_rank}"}, None),
    ],
)
def test_each_task_of_several_nodes_receives_copies_at_its_interface_or_its_nodes_address(
    submit, tmp_path, nodes, name, given, interface
):
    handed = submit()
    start = handed.index("-c") + 1
    script = "\n".join(handed[start : handed.index("task")]).replace(
        '"$PYTHON" -u', "printf '%s\\n'"
    )
    slurm = {"SLURM_PROCID": "0", "SLURM_NNODES": nodes, "SLURMD_NODENAME": name}
    result = subprocess.run(
        ["bash", "-c", script, "task", "program", "--seed", "a b"],
        env=os.environ | slurm | given | {"CODES": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    flags = [] if interface is None else ["--moevement-replication-interface", interface]
    assert result.stdout.splitlines() == ["program", *flags, "--seed", "a b"]
    assert result.stderr == ""


def test_a_job_that_left_its_state_in_memory_is_launched_again(submit):
    launches = submit(CODE="75", RELAUNCHES="2", code=75).count("--kill-on-bad-exit=0")
    assert launches == 3
    assert submit(CODE="1", code=1).count("--kill-on-bad-exit=0") == 1
    assert submit(CODE="2", code=2).count("--kill-on-bad-exit=0") == 1


def test_the_last_line_names_who_was_lost_and_where(submit, tmp_path):
    submit()
    assert submit.said == []
    hint = f"; `moevement report {tmp_path}/a run/events` shows what happened"
    lost = "node2 lost task 11 (exit code 137), task 15 (no exit code)"
    kept = "train_moe.sbatch: launch {} ends with exit code 75; " + lost + "; its state is kept"
    left = "train_moe.sbatch: nodes that are left: localhost node2; "
    submit(CODE="75", KILLED="11", RELAUNCHES="1", code=75)
    assert submit.said == [
        f"{kept.format(1)}: it is launched again in this allocation{hint}",
        f"{kept.format(2)}{hint}",
        f"{left}the job is queued again",
    ]
    assert submit.levels == ["ERROR", "ERROR", "WARNING"]
    submit(CODE="75", KILLED="11", RELAUNCHES="0", code=75, SLURM_RESTART_COUNT="10")
    assert submit.said[1:] == [f"{left}submit the job again as it was to go on"]
    assert submit.levels[1:] == ["ERROR"]
    submit(CODE="0", KILLED="11", SPARES="2")
    assert submit.said == [f"train_moe.sbatch: launch 1 ends with exit code 0; {lost}{hint}"]
    assert submit.levels == ["INFO"]
    submit(CODE="1", code=1)
    (line,) = submit.said
    assert "exit code 1; on node" in line
    assert line.count("(exit code 1)") == 16
    submit(CODE="2", code=2)
    assert submit.said == []


def test_a_node_that_is_lost_takes_no_part_in_the_next_launch(submit):
    handed = submit(CODE="75", LOST="1", RELAUNCHES="1", SPARES="8", code=75)
    places = [place for place, word in enumerate(handed) if word == "--nodes"]
    launches = [handed[place + 1 : place + 6] for place in places]
    assert launches == [
        ["2", "--ntasks", "16", "--nodelist", "localhost,node2"],
        ["1", "--ntasks", "8", "--nodelist", "localhost"],
    ]
    submit(CODE="75", LOST="1", RELAUNCHES="0", SPARES="8", code=75)
    assert submit.said[-1].endswith("nodes that are left: localhost; the job is queued again")
    handed = submit(CODE="75", LOST="1", RELAUNCHES="1", code=75)
    assert handed.count("--kill-on-bad-exit=0") == 1
    assert submit.said[-1].endswith("nodes that are left: localhost; the job is queued again")


def test_a_job_that_is_only_checked_is_looked_at_by_all_its_tasks(submit, tmp_path):
    handed = submit()
    script = "\n".join(handed[handed.index("-c") + 1 : handed.index("task")])
    shown = script.replace('"$PYTHON" -u', "printf '%s\\n' \"$PYTHONPATH\"")
    variables = {"CHECK": "1", "CHECK_FLAGS": "--iteration-time 2.5", "PYTHONPATH": ""}
    variables |= {"SLURM_PROCID": "0", "SLURM_NNODES": "1", "CODES": str(tmp_path)}
    result = subprocess.run(
        ["bash", "-c", shown, "task", "/repository/pretrain_moe.py", "--seed", "a b"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    check = ["-m", "megatron_moevement.cli", "check", "--iteration-time", "2.5", "--"]
    assert result.stdout.splitlines() == ["/repository", *check, "--seed", "a b"]


@pytest.mark.parametrize(
    ("beats", "down", "ended", "restarts", "queued"),
    [
        ("", "node1", "5", "0", True),
        ("", "node1", "5", "10", False),  # often enough
        ("", "node1", "", "0", False),  # task 5 has not ended
        ("", "node1 node3", "", "0", True),  # nor will it
        ("", "node3", "35", "0", False),  # the batch script may run
        ("echo $$ >\"$BEAT\"", "node1", "5", "0", False),  # it does
    ],
)  # fmt: skip
def test_where_the_node_of_the_batch_script_is_lost_one_task_queues_the_job_again(
    submit, tmp_path, beats, down, ended, restarts, queued
):
    handed = submit()
    start = handed.index("-c") + 1
    script = "\n".join(handed[start : handed.index("task")])
    codes = tmp_path / "codes"
    codes.mkdir()
    for task, node in (("3", "node1"), ("5", "node3")):
        (codes / f"{task}.node").write_text(f"{node}\n")
    for task in ended:
        (codes / task).write_text("75\n")
    programs = {
        "python": "exit 75",
        "sleep": f'echo >>"$CODES/slept"; {beats}\n'
        '[ "$(wc -l <"$CODES/slept")" -lt 12 ] || kill -KILL $PPID',
        "sinfo": f'for node in {down}; do [ "$node" != "$3" ] || echo "down*"; done',
        "scontrol": '[ "$1" = requeue ] || { echo "   StdOut=$CODES/log"; exit; }\n'
        'echo "$2" >>"$CODES/asked"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python", "CODES": str(codes),
        "SLURM_PROCID": "1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "77", "BEAT": str(codes / "beat"),
        "BATCH_NODE": "node1", "REQUEUES": "10", "SLURM_RESTART_COUNT": restarts,
    }  # fmt: skip
    (codes / "beat").write_text("as it was\n")
    for node in ("node2", "node2", "node4"):  # one of each node looks, one of all asks
        subprocess.run(
            ["bash", "-c", script, "task", "program"],
            env=os.environ | environment | {"SLURMD_NODENAME": node},
            capture_output=True,
            check=False,
        )
        (codes / "slept").unlink(missing_ok=True)
    asked = codes / "asked"
    assert (asked.read_text().split() if asked.exists() else []) == ["77"] * queued
    said = (codes / "log").read_text() if (codes / "log").exists() else ""
    lines = [(one.place, one.level, one.text) for one in log_lines(said)]
    level, end = ("WARNING", "the job is queued again")
    if not queued:
        level, end = ("ERROR", "scontrol requeue 77 to go on")
    line = ("task 1", level, f"node1, where the batch script ran, is lost; {end}")
    assert lines == [line] * (queued or restarts == "10")
