# SPDX-License-Identifier: Apache-2.0
"""Several processes are killed at one moment: their stages replay, the others stand by.

One cell runs by default; the others are marked slow and run by one command:

    ./scripts/losses_campaign.sh
"""

import functools
import shutil
from pathlib import Path

import pytest

from tests.harness.default_run import slow_but
from tests.harness.interruption import Run
from tests.harness.losses import CELLS
from tests.harness.losses_run import LossesRun, plain_program, protected_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(550)]

PROGRAM = Path(__file__).with_name("domains_pretrain.py")
BY_NAME = {cell.name: cell for cell in CELLS}


@pytest.fixture(scope="session")
def digest_of(megatron_fork_server, text, tmp_path_factory):
    """Returns the digest of what a cell trains when nothing protects or strikes it."""

    @functools.cache
    def digest(name):
        folder = tmp_path_factory.mktemp("uninterrupted")
        program = plain_program(BY_NAME[name], megatron_fork_server, text)
        found = Run(program, folder).finish()
        shutil.rmtree(folder)
        return found

    return digest


@pytest.mark.parametrize("name", slow_but(("all-at-once",), BY_NAME))
def test_lost_stages_replay_and_no_bit_differs(
    megatron_fork_server, text, digest_of, tmp_path, name
):
    cell = BY_NAME[name]
    program = protected_program(cell, megatron_fork_server, text, PROGRAM)
    run = LossesRun(cell, program, tmp_path)
    run.go()
    run.check(digest_of(name))


def test_each_loss_is_described_once():
    assert len(BY_NAME) == len(CELLS)
    for cell in CELLS:
        stages = {rank // cell.ranks_per_stage for rank in cell.lost}
        assert stages == set(cell.scope)
        assert set(cell.lost) <= cell.given_up
