"""What the flags of protection mean."""

import pytest

from megatron_moevement.settings.fault_tolerance import FaultTolerance


@pytest.mark.parametrize("limit_bytes", [1, 3989695, 8 * 10**9 + 1])
def test_the_limit_of_host_memory_is_the_number_of_bytes_that_was_given(limit_bytes):
    settings = FaultTolerance(moevement_host_memory_limit_gb=limit_bytes / 1e9)
    assert settings.host_memory_limit_bytes == limit_bytes


def test_without_a_limit_there_is_none():
    assert FaultTolerance().host_memory_limit_bytes is None
