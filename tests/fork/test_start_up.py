# SPDX-License-Identifier: Apache-2.0
"""The training program on a Megatron-Core without the patches."""

import os
import subprocess
import sys

from tests.harness.bad_input import only_line


def test_the_program_ends_with_code_2_and_one_line_on_an_unpatched_megatron(tree, request):
    flags = ["--moevement-backend", "cpu", "--model-preset", "tiny", "--mock-data"]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--train-iters", "1"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "1e-3"]
    result = subprocess.run(
        [sys.executable, request.config.rootpath / "pretrain_moe.py", *flags],
        env=os.environ | {"PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    line = only_line(result.stderr)
    assert line.startswith(f"Megatron-Core at {tree} lacks the MoEvement patches")
