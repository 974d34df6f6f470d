# SPDX-License-Identifier: Apache-2.0
"""What is read in the background takes a bounded share of a process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moevement.policy.watching.reading_pace import ReadingPace

SECONDS = st.floats(0, 1e6)


def test_a_piece_is_paused_for_by_its_size():
    assert ReadingPace(100).pause_s(250) == 2.5


@pytest.mark.parametrize(
    ("spent_s", "passed_s", "debt_s"),
    [(0, 0, 0), (0.5, 2, 0), (0.5, 1.5, 0.5), (1, 1, 3)],
)
def test_reading_stops_where_it_took_more_than_its_share(spent_s, passed_s, debt_s):
    assert ReadingPace(cpu_share=0.25).debt_s(spent_s, passed_s) == debt_s


@given(spent_s=SECONDS, passed_s=SECONDS)
def test_once_the_debt_has_passed_nothing_is_owed(spent_s, passed_s):
    pace = ReadingPace()
    assert pace.debt_s(spent_s, passed_s + pace.debt_s(spent_s, passed_s)) < 1e-6
