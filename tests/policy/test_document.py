# SPDX-License-Identifier: Apache-2.0
"""Frozen data as JSON: what is written is what it always was, and nothing else is read."""

import dataclasses
import json

import pytest

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.job.guarantee import Computation, DeviceKind, Kernels
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.outcome.account import RankAccount
from megatron_moevement.policy.outcome.replay_proof import Compared, ReplayProof
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import Timetable, Trial, WindowDecision
from tests.harness.one_schedule import one_schedule

DECISION = WindowDecision(2, None, 24, 4, Trial(4, 9, 1.25, 0.5, None))
STATE = JournalState(7, one_schedule(2, 1, 1), 6, Window(3, 2, 1), LogicalRank(pp=1))
COMPUTATION = Computation(DeviceKind.CPU, Kernels.ANY, 1, {"cpu": "x"}, {"NCCL_ALGO": "Ring"})
ACCOUNT = RankAccount(2, ReplayProof(scalars=Compared(2, 1)), {"detect": 0.5, "wait": 0}, 3)
NOTHING = '{"equal": 0, "unequal": 0}'
TIMETABLE = (
    '{"entries": [{"epoch": 1, "first_step": 1, "window": 2, "digest": "2 slots", '
    '"decision": null}], "first_version": 1}'
)
DECIDED = TIMETABLE.replace(
    "null",
    '{"window": 2, "used": null, "patience": 24, "reached": 4, "trial": {"former": 4, '
    '"slot_bytes": 9, "iteration_s": 1.25, "spread_s": 0.5, "delay_s": null}}',
)
TEXTS = [
    (
        STATE,
        f'{{"era": 7, "timetable": {TIMETABLE}, "committed": 6, "persisted": '
        '{"start": 3, "size": 2, "epoch": 1}, "rank": "pp1.dp0.tp0.cp0.ep0"}',
    ),
    (
        dataclasses.replace(STATE, persisted=None, rank=None),
        f'{{"era": 7, "timetable": {TIMETABLE}, "committed": 6, "persisted": null, "rank": null}}',
    ),
    (one_schedule(2, 1, 1, DECISION), DECIDED),
    (
        COMPUTATION,
        '{"device": "cpu", "kernels": "any", "threads": 1, "parts": {"cpu": "x"}, '
        '"variables": {"NCCL_ALGO": "Ring"}}',
    ),
    (
        ACCOUNT,
        '{"replayed_steps": 2, "proof": {"scalars": {"equal": 2, "unequal": 1}, "tensors": '
        f'{NOTHING}, "slots": {NOTHING}, "states": {NOTHING}, "targets": 0, "ranks": 1}}, '
        '"breakdown_s": {"detect": 0.5, "wait": 0}, "owed_copies": 3, "moved_copies": 0}',
    ),
]


@pytest.mark.parametrize(("value", "text"), TEXTS)
def test_what_is_written_is_read_again(value, text):
    assert json.dumps(value.document()) == text
    assert type(value).of_document(json.loads(text)) == value


def test_a_window_of_an_older_build_has_no_epoch():
    document = {**STATE.document(), "persisted": {"start": 3, "size": 2}}
    assert JournalState.of_document(document).persisted == Window(3, 2, 0)


def test_a_schedule_of_an_older_build_has_no_decision():
    document = json.loads(TIMETABLE.replace(', "decision": null', ""))
    assert Timetable.of_document(document) == one_schedule(2, 1, 1)


def test_data_is_picked_out_of_other_fields():
    assert JournalState.out_of({**STATE.document(), "weather": "fine"}) == STATE
    document = {**STATE.document(), "weather": "fine"}
    del document["rank"]
    with pytest.raises(KeyError, match="rank"):
        JournalState.out_of(document)


@pytest.mark.parametrize("name", STATE.document())
def test_no_field_may_be_lacking(name):
    document = STATE.document()
    del document[name]
    with pytest.raises(KeyError, match=name):
        JournalState.of_document(document)


@pytest.mark.parametrize(
    ("value", "changes", "reason"),
    [
        (STATE, {"committed": "6"}, "'6' is no int"),
        (STATE, {"committed": True}, "True is no int"),
        (STATE, {"committed": -1}, "no count: -1"),
        (STATE, {"era": 2**63}, "no count"),
        (STATE, {"persisted": {"start": 3.0, "size": 2}}, "3.0 is no int"),
        (STATE, {"persisted": [3, 2]}, None),
        (STATE, {"rank": "rank 3"}, "'rank 3' names no logical rank"),
        (STATE, {"rank": 3}, None),
        (STATE, {"weather": "fine"}, "JournalState has no field 'weather'"),
        (STATE, {"persisted": {"start": 3, "size": 2, "slots": 1}}, "Window has no field 'slots'"),
        (COMPUTATION, {"device": "tpu"}, "'tpu' is not a valid DeviceKind"),
        (COMPUTATION, {"parts": {"cpu": 1}}, "1 is no str"),
        (COMPUTATION, {"parts": ["cpu"]}, None),
        (ACCOUNT, {"breakdown_s": {"wait": "1"}}, "'1' is no float"),
        (ACCOUNT, {"proof": {"scalars": {}}}, "equal"),
    ],
)
def test_what_is_of_another_type_is_refused(value, changes, reason):
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError), match=reason):
        type(value).of_document(value.document() | changes)
