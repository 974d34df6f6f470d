# SPDX-License-Identifier: Apache-2.0
"""`moevement --print-completion`: a shell that reads it completes commands and their flags."""

import subprocess
import sys

import pytest

from megatron_moevement.cli import main

COMPLETE = """
source "$1"
COMP_WORDS=({words}) COMP_CWORD={last} COMP_LINE="{words}" COMP_POINT=${{#COMP_LINE}}
"$(complete -p moevement | sed 's/.*-F \\([^ ]*\\).*/\\1/')" moevement
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("moevement sch", {"schedule"}),
        ("moevement inspect --s", {"--store-dir", "--summary"}),
        ("moevement data prep", {"prepare"}),
        ("moevement schedule --capture s", {"shard"}),
    ],
)
def test_bash_completes_what_is_typed(words, expected, tmp_path):
    script = tmp_path / "completion"
    command = [sys.executable, "-m", "megatron_moevement.cli", "--print-completion", "bash"]
    script.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    typed = COMPLETE.format(words=words, last=len(words.split()) - 1)
    result = subprocess.run(
        ["bash", "-c", typed, "bash", script], check=True, capture_output=True, text=True
    )
    assert set(result.stdout.split()) == expected, result.stderr


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "nosuchshell"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err
