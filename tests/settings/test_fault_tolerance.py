"""What the flags of protection mean."""

import pytest

from megatron_moevement.settings.fault_tolerance import FaultTolerance


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ("127.0.0.1", ["127.0.0.1"] * 4),
        ("ib{local_rank}", ["ib0", "ib1", "ib2", "ib3"]),
        ("ib0,ib1", ["ib0", "ib1", "ib0", "ib1"]),
        ("10.0.{local_rank}.7,node-a", ["10.0.0.7", "node-a", "10.0.2.7", "node-a"]),
    ],
)
def test_each_local_rank_has_an_interface(given, places):
    settings = FaultTolerance(moevement_replication_interface=given)
    own = [settings.of_process(local_rank) for local_rank in range(4)]
    assert [one.moevement_replication_interface for one in own] == places


@pytest.mark.parametrize("limit_bytes", [1, 3989695, 8 * 10**9 + 1])
def test_the_limit_of_host_memory_is_the_number_of_bytes_that_was_given(limit_bytes):
    settings = FaultTolerance(moevement_host_memory_limit_gb=limit_bytes / 1e9)
    assert settings.host_memory_limit_bytes == limit_bytes


def test_without_a_limit_there_is_none():
    assert FaultTolerance().host_memory_limit_bytes is None
