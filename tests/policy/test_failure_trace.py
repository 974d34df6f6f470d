# SPDX-License-Identifier: Apache-2.0
"""Failure traces of three kinds: what fails in them when, and what is no trace."""

from datetime import timedelta

import pytest

from megatron_moevement.policy.faults.failure_trace import Failure, read_trace

NORMALISED = """\
t_ms,event,node,alive_after
0,init,12,12
719880,remove,node18,11
1979880,add,node52,12
2639880,remove,node42,11
2639880,remove,node51,10
"""
ROWS = """\
480000,add,node1
540000,add,node2
540000,add,node3
1440000,remove,node3
1440000,remove,node1
1560000,remove,node2
"""
SAMPLES = """\
2021-12-10, 13:09:45, 80
2021-12-10, 13:08:45, 70
2021-12-10, 13:10:45, 70
2021-12-10, 13:09:45, 60
2021-12-10, 13:10:58, 64
2021-12-10, 13:09:15, 60
"""


def failure(at_s, lost, alive):
    return Failure(timedelta(seconds=at_s), lost, alive)


def test_rows_with_a_header_begin_with_a_number_of_nodes():
    assert read_trace(NORMALISED) == (failure(719.88, 1, 12), failure(2639.88, 2, 12))


def test_rows_without_a_header_count_the_nodes_themselves():
    assert read_trace(ROWS) == (failure(1440, 2, 3), failure(1560, 1, 1))


def test_samples_are_compared_in_the_order_of_the_file_and_then_sorted_by_their_stamps():
    assert read_trace(SAMPLES) == (failure(0, 10, 80), failure(30, 4, 64), failure(60, 10, 70))


def test_losses_of_one_time_are_one_failure():
    rows = "0,init,4,4\n5,remove,a,3\n5,add,b,4\n5,remove,c,3\n"
    assert read_trace("t_ms,event,node,alive_after\n" + rows) == (failure(0.005, 2, 4),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ("time,node\n", "line 1: 'time,node' begins no trace; a trace begins with t_ms,event"),
        ("0,add,n1\n", "no node fails in it"),
        ("0,add,n1\n5,lose,n1\n", "line 2: '5,lose,n1' is neither init, add nor remove"),
        ("0,remove,n1\n", "line 1: '0,remove,n1' takes a node where there is none"),
        (NORMALISED.replace("node18,11", "node18,10"), "line 3: .*, but 11 nodes are alive"),
        (SAMPLES + "2021-12-10 13:11:58 64\n", "line 7: .* is no sample such as '2021-12-10, 13"),
        (SAMPLES + "2021-02-30, 13:11:58, 64\n", "line 7: .* is at no time"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(text, reason):
    with pytest.raises(ValueError, match=reason):
        read_trace(text)
