# SPDX-License-Identifier: Apache-2.0
"""`--print-completion`: a shell that reads it completes commands and their flags."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.cli import main
from megatron_moevement.training.arguments import build_parser as build_job_parser

COMPLETE = """
source "$1"
COMP_WORDS=({words}) COMP_CWORD={last} COMP_LINE="{words}" COMP_POINT=${{#COMP_LINE}}
"$(complete -p {command} | sed 's/.*-F \\([^ ]*\\).*/\\1/')" {command}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


PROGRAMS = {
    "moevement": ["-m", "megatron_moevement.cli"],
    "pretrain_moe.py": [Path(__file__).resolve().parents[2] / "pretrain_moe.py"],
}


@pytest.fixture
def completed(tmp_path):
    """Returns a function that gives what bash completes to, with what a program prints for it."""

    def complete(program, words):
        script = tmp_path / "completion"
        command = [sys.executable, *PROGRAMS[program], "--print-completion", "bash"]
        script.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        first, last = words.split()[0], len(words.split()) - 1
        typed = COMPLETE.format(words=words, last=last, command=first)
        result = subprocess.run(
            ["bash", "-c", typed, "bash", script], check=True, capture_output=True, text=True
        )
        return set(result.stdout.split())

    return complete


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("moevement sch", {"schedule"}),
        ("moevement inspect --s", {"--store-dir", "--summary"}),
        ("moevement data prep", {"prepare"}),
        ("moevement schedule --capture s", {"shard"}),
    ],
)
def test_bash_completes_what_is_typed(words, expected, completed):
    assert completed("moevement", words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pretrain_moe.py --tensor-m", {"--tensor-model-parallel-size"}),
        (
            "python ../pretrain_moe.py --lr 3 --moevement-max-",
            {"--moevement-max-window", "--moevement-max-replay-steps"},
        ),
        ("python3 pretrain_moe.py --moevement-strategy m", {"moevement"}),
        ("torchrun --nproc-per-node 2 pretrain_moe.py --model-preset t", {"tiny"}),
        ("run_local.sh -n 2 -- --adam-b", {"--adam-beta1", "--adam-beta2"}),
        ("run_local.sh -n 2 --adam-b", set()),
        ("python other.py --adam-b", set()),
        ("python other.py -- --adam-b", set()),
    ],
)
def test_bash_completes_the_flags_of_a_job_behind_launchers_too(words, expected, completed):
    assert completed("pretrain_moe.py", words) == expected


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_the_flags_of_a_job(shell, capsys):
    with pytest.raises(SystemExit) as ended:
        build_job_parser().parse_args(["--print-completion", shell])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--moevement-strategy" in text or "moevement-strategy" in text
    assert "COMP_WORDS" not in text  # of bash


def test_flags_of_a_job_are_printed_without_torch():
    code = f"""
import sys
sys.argv = ["pretrain_moe.py", "--print-completion", "bash"]
try:
    exec(compile(open({str(PROGRAMS["pretrain_moe.py"][0])!r}).read(), "program", "exec"))
finally:
    sys.stderr.write(str("torch" in sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ("--moevement-strategy" in ended.stdout, ended.stderr) == (True, "False")


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "nosuchshell"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
