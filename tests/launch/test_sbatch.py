"""The Slurm script up to the command that it hands to `srun`; no cluster is needed for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/sh
echo "$PYTHON" >"$RUN_DIR/python"
case "$*" in
*" stores "*) echo "MASTER_ADDR=$MASTER_ADDR"; echo "$@" >"$RUN_DIR/served"; exec sleep 60 ;;
*) printf "%s\\n" "$@"; for rank in $(seq 16); do echo "${CODE:-0}" >"$CODES/$rank"; done ;;
esac
"""


@pytest.fixture
def submit(tmp_path):
    """Runs the script as a job of Slurm; returns the arguments of `srun`."""
    nodes = "#!/bin/sh\nprintf '%s\\n' localhost node2\n"
    for name, text in (("srun", SRUN), ("scontrol", nodes)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments, code=0, **variables):
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS": "16",
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


def test_the_stores_are_served_by_the_first_node_beside_the_ranks(submit, tmp_path):
    submit()
    served = (tmp_path / "a run" / "served").read_text()
    assert served.startswith("--overlap --nodes 1 --ntasks 1 --nodelist localhost ")
    task = 'cli stores     --interface "$MASTER_ADDR" --port "$MASTER_PORT" --processes "$2"'
    assert task in served.replace("\\", "").replace("\n", "")


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


@pytest.mark.parametrize(
    ("nodes", "name", "interface"),
    [
        ("2", "localhost", ["--moevement-replication-interface", "127.0.0.1"]),
        ("2", "no-such-node.invalid", []),
        ("1", "localhost", []),
    ],
)
def test_each_task_of_several_nodes_receives_copies_at_the_address_of_its_node(
    submit, tmp_path, nodes, name, interface
):
    handed = submit()
    start = handed.index("-c") + 1
    script = "\n".join(handed[start : handed.index("task")]).replace(
        '"$PYTHON" -u', "printf '%s\\n'"
    )
    slurm = {"SLURM_PROCID": "0", "SLURM_NNODES": nodes, "SLURMD_NODENAME": name}
    result = subprocess.run(
        ["bash", "-c", script, "task", "program", "--seed", "a b"],
        env=os.environ | slurm | {"CODES": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == ["program", *interface, "--seed", "a b"]
    assert result.stderr == ""


def test_a_job_that_left_its_state_in_memory_is_launched_again(submit):
    launches = submit(CODE="75", RELAUNCHES="2", code=75).count("--kill-on-bad-exit=0")
    assert launches == 3
    assert submit(CODE="1", code=1).count("--kill-on-bad-exit=0") == 1
