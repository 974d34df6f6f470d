# SPDX-License-Identifier: Apache-2.0
"""How many kernels torch keeps on a CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_moevement.settings.cpu_kernels import CAPACITIES, limit_kept_kernels

SHAPES = 200
FLAGS = (
    "--model-preset=tiny",
    "--mock-data",
    "--tokenizer-type=ByteTokenizer",
    "--train-iters=1",
    "--lr=1e-4",
    "--micro-batch-size=1",
    "--global-batch-size=1",
)
BEFORE_TORCH = f"""
import json, os, sys
from megatron_moevement.training import program
def choose(given):
    found = {{name: os.environ[name] for name in {CAPACITIES}}}
    print(json.dumps([found, "torch" in sys.modules]))
    os._exit(0)
program.choose = choose
program.main({FLAGS})
"""
GROWTH = f"""
import psutil, torch
torch.set_num_threads(1)
weight = torch.ones(512, 256, dtype=torch.bfloat16)
torch.ones(1, 256, dtype=torch.bfloat16) @ weight.t()
before_bytes = psutil.Process().memory_info().rss
for rows in range(2, 2 + {SHAPES}):
    torch.ones(rows, 256, dtype=torch.bfloat16) @ weight.t()
print(psutil.Process().memory_info().rss - before_bytes)
"""


def output(program, variables):
    others = {name: value for name, value in os.environ.items() if name not in CAPACITIES}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return json.loads(subprocess.check_output(command, env={**others, **variables}, text=True))


def test_it_is_set_before_torch_is_imported():
    assert output(BEFORE_TORCH, {}) == [dict.fromkeys(CAPACITIES, "64"), False]


@pytest.mark.parametrize("name", CAPACITIES)
def test_what_a_user_has_set_stays(name):
    environment = {name: "7"}
    limit_kept_kernels(environment)
    assert environment == {**dict.fromkeys(CAPACITIES, "64"), name: "7"}


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no BF16 kernels here"
)
def test_memory_grows_with_few_shapes_only():
    environment = {}
    limit_kept_kernels(environment)
    unlimited = output(GROWTH, dict.fromkeys(CAPACITIES, "1024"))
    assert output(GROWTH, environment) < unlimited / 2
