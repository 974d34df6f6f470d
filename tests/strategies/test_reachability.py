# SPDX-License-Identifier: Apache-2.0
"""A job on several machines whose processes could not send each other copies does not begin."""

import dataclasses
from pathlib import Path

import pytest

from tests.harness.interruption import Run
from tests.harness.log_lines import log_lines
from tests.harness.protected_run import Case

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

PROGRAM = Path(__file__).with_name("two_machines_pretrain.py")
CASE = Case.of("vpp2 fp16 replicated grouped", 2)
SAID = (
    "--moevement-replication-interface: process 0 receives copies at 127.0.0.1, "
    "which its own machine alone reaches, and the job is on 2 machines: give each process an "
    "address of its machine in the network between them"
)


def test_a_loopback_interface_is_refused_on_all_ranks_where_they_are_on_two_machines(
    megatron_fork_server, text, tmp_path
):
    place = "--moevement-replication-interface=127.0.{local_rank}.1"
    program = CASE.protected_program(megatron_fork_server, text, place)
    run = Run(dataclasses.replace(program, path=PROGRAM), tmp_path)
    with run.start() as job:
        result = job.wait()
    assert result.exit_codes == (2, 2), result.describe()
    said = [line.text for rank in result.ranks for line in log_lines(rank.stderr)]
    assert [line for line in said if "replication-interface" in line] == [SAID]
    assert not run.store.exists()
