# SPDX-License-Identifier: Apache-2.0
"""Trouble with a holder: it is tried again after longer and longer pauses, and never forgotten."""

import pytest

from megatron_moevement.policy.copies.peer_trouble import Remedy, Trouble


def after(failures, lasted_s=0.01):
    """Returns the trouble after failures in a row, each of which was tried as soon as it may be."""
    trouble, now_s = None, 100.0
    for _ in range(failures):
        now_s += lasted_s
        trouble = Trouble.after(trouble, now_s - lasted_s, now_s, "reset")
        now_s += trouble.pause_s
    return trouble


def test_pauses_double_up_to_the_longest():
    pauses = [after(failures).pause_s for failures in range(1, 10)]
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 10, 10, 10]
    assert after(5000).pause_s == 10


@pytest.mark.parametrize("failures", [1, 4, 50])
def test_a_peer_is_tried_again_when_its_pause_is_over_however_often_it_failed(failures):
    trouble = after(failures)
    assert trouble.remedy(trouble.last_s + trouble.pause_s * 0.99) is Remedy.WAIT
    assert trouble.remedy(trouble.last_s + trouble.pause_s) is Remedy.TRY_AGAIN


def test_a_hiccup_is_not_lasting_and_four_failures_in_a_row_are():
    assert [after(failures).is_lasting for failures in (1, 2, 3, 4, 5)] == [False] * 3 + [True] * 2


def test_one_transfer_that_gets_no_answer_is_lasting():
    assert after(1, lasted_s=60).is_lasting
    assert not after(2, lasted_s=10).is_lasting
    assert after(3, lasted_s=10).is_lasting


def test_who_was_replaced_may_keep_copies_again_after_a_while():
    trouble = after(4)
    assert not trouble.is_forgotten(trouble.last_s + 59)
    assert trouble.is_forgotten(trouble.last_s + 60)


def test_the_reason_is_that_of_the_last_failure():
    assert Trouble.after(after(2), 200, 201, "refused") == Trouble(3, 100.0, 201, "refused")
