# SPDX-License-Identifier: Apache-2.0
"""`moevement presets`: what it prints, and that Megatron is not imported for it."""

import subprocess
import sys

from megatron_moevement.cli import main


def test_sizes_are_told_in_the_unit_that_suits_them(capsys):
    assert main(["presets"]) == 0
    rows = capsys.readouterr().out.splitlines()
    told = {row.split()[1]: row.replace("│", " ").split()[5:] for row in rows if "│" in row}
    assert told["tiny"] == ["1.88", "M", "0.702", "M"]
    assert told["deepseek-moe"] == ["16.5", "B", "3.64", "B"]


def test_nothing_slow_is_imported():
    code = (
        "import sys; from megatron_moevement.cli import main; main(['presets']);"
        "sys.exit(bool({'megatron.core', 'torch'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
