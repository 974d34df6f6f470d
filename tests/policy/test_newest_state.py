# SPDX-License-Identifier: Apache-2.0
"""Whether a recovery goes on from memory or from a durable checkpoint."""

import dataclasses

import pytest

from megatron_moevement.policy.facts.facts import Condition, LiveState
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.recovery.histories import of_newest_history
from megatron_moevement.policy.recovery.newest_state import is_memory_newest
from tests.harness.job_facts import Job, without_processes

JOB = Job(Layout(pp=3), step=13)


def facts_of(durable, **changes):
    facts = without_processes(dataclasses.replace(JOB, durable=durable).facts(), {2})
    processes = [dataclasses.replace(process, **changes) for process in facts.processes]
    return dataclasses.replace(facts, processes=tuple(processes))


@pytest.mark.parametrize(("durable", "newest"), [(0, True), (12, True), (13, True), (14, False)])
def test_the_newer_state_is_taken_and_who_holds_it_keeps_it(durable, newest):
    assert is_memory_newest(facts_of(durable)) == newest


def test_a_job_that_is_launched_again_loads_what_is_as_new():
    absent = LiveState(Condition.ABSENT)
    assert not is_memory_newest(facts_of(13, live=absent))
    assert is_memory_newest(facts_of(12, live=absent))


def test_a_job_that_has_just_begun_with_the_durable_state_begins_with_it_again():
    assert not is_memory_newest(facts_of(13, ledger=range(0)))


def test_without_any_process_that_knows_of_a_step_there_is_no_memory():
    assert not is_memory_newest(facts_of(None, committed=None))
    assert not is_memory_newest(facts_of(13, committed=None))


def test_facts_of_one_history_are_looked_through_once():
    facts = dataclasses.replace(
        facts_of(12), processes=tuple(reversed(facts_of(12, holdings=()).processes))
    )
    newest = of_newest_history(facts)
    assert newest == of_newest_history(facts_of(12, holdings=()))
    assert of_newest_history(newest) is newest


def test_another_history_that_a_new_process_finds_is_not_gone_on_from():
    facts = facts_of(12)
    first, second = facts.processes[:2]
    found = dataclasses.replace(second, committed=40, rollbacks=9, is_new=True)
    facts = dataclasses.replace(facts, processes=(first, found))
    assert {process.committed for process in of_newest_history(facts).processes} == {13, None}
    newest = of_newest_history(facts)
    assert is_memory_newest(newest)
    assert not is_memory_newest(dataclasses.replace(newest, durable=14))
