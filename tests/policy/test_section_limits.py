# SPDX-License-Identifier: Apache-2.0
"""Limits of sections: learned from all ranks, merged with what was learned before."""

import json

import pytest

from megatron_moevement.policy.watching.section_limits import OUTSIDE, SectionLimits, longest_of_all

LAUNCHED = SectionLimits({"setup": 600.0, "step": 100.0, OUTSIDE: None})


def test_a_limit_is_a_multiple_of_the_longest_time_and_the_others_stay():
    found = LAUNCHED.learn({"step": 3.0}, factor=5)
    assert found.seconds == {"setup": 600.0, "step": 15.0, OUTSIDE: None}
    assert found.learned == {"step"}


def test_what_was_learned_before_counts_half():
    again = LAUNCHED.learn({"step": 3.0}, 5).learn({"step": 1.0, OUTSIDE: 2.0}, 5)
    assert again.seconds == {"setup": 600.0, "step": 10.0, OUTSIDE: 10.0}


def test_nothing_is_learned_of_a_section_that_has_no_name_at_the_launcher():
    assert LAUNCHED.learn({"checkpointing": 3.0}, 5) == LAUNCHED


def test_a_later_run_finds_what_was_learned_and_takes_the_rest_from_its_launcher():
    learned = LAUNCHED.learn({"step": 3.0, OUTSIDE: 2.0}, 5)
    document = json.loads(json.dumps(learned.document()))
    later = SectionLimits({"step": 7.0, "checkpointing": 9.0, OUTSIDE: 8.0}).updated(document)
    assert later.seconds == {"step": 15.0, "checkpointing": 9.0, OUTSIDE: 10.0}
    assert later.learned == {"step", OUTSIDE}


@pytest.mark.parametrize("document", [{}, {"current_timeouts": {"section": 3}}])
def test_a_document_without_limits_is_noticed(document):
    with pytest.raises((KeyError, TypeError)):
        LAUNCHED.updated(document)


def test_the_longest_time_of_all_ranks_counts_unless_one_has_seen_too_little():
    ranks = [{"step": 1.0, "setup": 5.0}, {"step": 2.0, "setup": None}]
    assert longest_of_all(ranks) == {"step": 2.0}
