# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks write their tiers to the same place."""

import pytest

from megatron_moevement.policy.tiers.sharing import Mark, apart

WROTE = [Mark(host, None) for host in ("a", "a", "b", "c", "d", "e", "f")]


def test_ranks_whose_marks_the_first_one_does_not_see_write_elsewhere():
    told = apart(WROTE[:4], [1])
    assert told.startswith("what 2 of 4 ranks wrote there (the first is rank 2; on b, c)")
    assert "rank 0 on a sees" in told


def test_of_many_hosts_some_are_named():
    assert "on a, b, c and 3 more)" in apart(WROTE, [])


@pytest.mark.parametrize(
    ("marks", "seen"),
    [
        (WROTE, range(1, 7)),
        (WROTE[:1], []),
        ([WROTE[0], Mark("b", "OSError: full")], []),
        ([WROTE[0], WROTE[2], Mark("b", "OSError: full")], [1]),
    ],
)
def test_who_is_seen_or_could_leave_nothing_refuses_no_job(marks, seen):
    assert apart(marks, seen) is None
