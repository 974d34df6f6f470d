# SPDX-License-Identifier: Apache-2.0
"""What the environment of a launcher says."""

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.settings.launch import Launch

FT_LAUNCHER = {
    "RANK": "1",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4001",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "FT_RANK_MONITOR_IPC_SOCKET": "/tmp/monitor",
}


@pytest.fixture
def launch(monkeypatch):
    """Returns the launch of an environment."""

    def read(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Launch.from_environment()

    return read


def test_one_process_by_itself(launch, monkeypatch):
    for name in (*FT_LAUNCHER, "MOEVEMENT_CONTROL_PORT"):
        monkeypatch.delenv(name, raising=False)
    alone = launch()
    assert (alone.rank, alone.world_size, alone.store, alone.rank_monitor) == (0, 1, None, None)
    assert alone.attempt == "0"


def test_stores_that_are_hosted_elsewhere_win_over_the_launchers_own(launch):
    assert launch(**FT_LAUNCHER).store == ("10.0.0.1", 4001)
    found = launch(
        MOEVEMENT_STORE_ADDR="10.0.0.9", MOEVEMENT_STORE_PORT="5001", MOEVEMENT_CONTROL_PORT="5002"
    )
    assert found.store == ("10.0.0.9", 5001)
    assert found.control_store == ("10.0.0.9", 5002)
    assert found.rank_monitor == "/tmp/monitor"


def test_each_start_of_a_job_has_a_name_that_all_its_agents_know(launch):
    first = launch(**FT_LAUNCHER)
    # An agent whose processes lived counts no restart.
    assert launch(TORCHELASTIC_RESTART_COUNT="1").attempt == first.attempt
    assert launch(MASTER_PORT="4002").attempt != first.attempt


def test_a_port_that_is_no_number_is_told_about(launch):
    with pytest.raises(UserError, match="MOEVEMENT_STORE_PORT"):
        launch(**FT_LAUNCHER, MOEVEMENT_STORE_PORT="x")
