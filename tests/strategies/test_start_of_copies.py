# SPDX-License-Identifier: Apache-2.0
"""Copies begin behind the first pass of the next step, not while other ranks still commit."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from tests.harness.interruption import Run
from tests.harness.protected_run import Case

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).with_name("ordered_pretrain.py")
CASE = Case.of("pp2-ep2 bf16 distributed-overlap", 2)


def test_the_copies_of_a_step_begin_in_the_next_one(megatron_fork_server, text, tmp_path):
    order = tmp_path / "order"
    program = CASE.protected_program(megatron_fork_server, text)
    flags = (*program.flags, f"--order-into={order}")
    program = dataclasses.replace(program, path=PROGRAM, flags=flags)
    Run(program, tmp_path / "run").finish()
    for rank in range(program.world_size):
        began = Path(f"{order}.{rank}").read_text(encoding="utf-8").splitlines()
        assert began[0] == "copies"  # of the initial state
        commits = [at for at, what in enumerate(began) if what == "commit"]
        assert len(commits) == program.train_iters
        for at, following in itertools.pairwise(commits):
            step = began[at + 1 : following]
            assert step.count("copies") == 1
            assert step[0] == "forward"
        assert began[commits[-1] + 1 :] == ["copies"]  # nothing follows: what closes begins them
