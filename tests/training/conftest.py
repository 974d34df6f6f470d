# SPDX-License-Identifier: Apache-2.0
"""What tests of checkpoints share."""

import pytest

from megatron_moevement.backends import cpu

cpu.install()  # before anything here imports Megatron-Core

from tests.harness.bad_input import run_tiny  # noqa: E402


@pytest.fixture(scope="session")
def saved(megatron_fork_server, tmp_path_factory):
    """A folder with the checkpoints of iterations 2 and 4 of a tiny job; nobody writes there."""
    folder = tmp_path_factory.mktemp("saved")
    argv = ["--save", str(folder), "--save-interval", "2", "--train-iters", "4"]
    server = megatron_fork_server
    assert server.run(run_tiny, world_size=1, args=[argv]).check().values == (0,)
    return folder
