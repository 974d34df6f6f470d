# SPDX-License-Identifier: Apache-2.0
"""The line of a recovery tells what the ranks told."""

import dataclasses
import json

from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.outcome.account import RankAccount, RecoveryAccount
from megatron_moevement.policy.outcome.replay_proof import Compared, ReplayProof
from megatron_moevement.policy.recovery.plan import Verdict

BEFORE = {"teardown": 0.5, "rendezvous": 1.0, "build": 1.5}
BYSTANDER = RankAccount(
    0, None, {**BEFORE, "plan": 0.2, "fetch": 0.1, "replay": 0.0, "reprotect": 0.0, "wait": 3.0}, 0
)
PROOF = ReplayProof(Compared(5), Compared(12), Compared(2), Compared(1), targets=1)
NEWCOMER = RankAccount(
    5, PROOF, {"plan": 0.1, "fetch": 0.3, "replay": 2.5, "reprotect": 0.2, "wait": 0.0}, 0
)
ACCOUNT = RecoveryAccount(1, Verdict.LOCALIZED, (1,), 174, Level.EXACT, [BYSTANDER, NEWCOMER])


def test_the_parts_are_those_of_the_rank_that_all_waited_for():
    assert dict(ACCOUNT.breakdown_s) == BEFORE | dict(NEWCOMER.breakdown_s)
    assert list(ACCOUNT.breakdown_s)[:4] == ["teardown", "rendezvous", "build", "plan"]
    assert ACCOUNT.duration_s == sum([0.5, 1.0, 1.5, 0.1, 0.3, 2.5, 0.2, 0.0])


def test_one_line_tells_it_all():
    assert ACCOUNT.line == (
        "generation 1: LOCALIZED, stage 1 replayed 5 steps (5 steps' scalars, 12 sent tensors, "
        "2 slots, 1 state equal; final state compared on 1 of 1 ranks), resumed at step 174, "
        "6.1 s (teardown 0.5, rendezvous 1.0, build 1.5, plan 0.1, fetch 0.3, replay 2.5, "
        "reprotect 0.2, wait 0.0), guarantee EXACT"
    )


def test_a_replay_that_differed_says_what_did():
    proof = dataclasses.replace(PROOF, slots=Compared(1, 1), states=Compared(0, 1))
    wrong = dataclasses.replace(NEWCOMER, proof=proof)
    account = dataclasses.replace(ACCOUNT, ranks=[BYSTANDER, wrong])
    assert not account.verified
    assert (
        "(1 slot UNEQUAL; 1 state UNEQUAL; 5 steps' scalars, 12 sent tensors, 1 slot equal; "
        in (account.line)
    )


def test_where_nothing_was_sent_no_line_says_that_it_was_the_same():
    proof = ReplayProof(scalars=Compared(3), targets=0)
    ranks = [dataclasses.replace(NEWCOMER, proof=proof)] * 2
    line = dataclasses.replace(ACCOUNT, verdict=Verdict.GLOBAL, ranks=ranks).line
    assert "(6 steps' scalars equal; final state compared on 0 of 2 ranks)" in line
    assert "sent" not in line


def test_a_final_state_that_nothing_was_left_of_is_not_called_exact():
    unlike = dataclasses.replace(NEWCOMER, proof=dataclasses.replace(PROOF, targets=0))
    line = dataclasses.replace(ACCOUNT, ranks=[NEWCOMER, unlike]).line
    expected = "guarantee EXACT but for the final state of 1 rank, which is not proven"
    assert line.endswith(expected)


def test_accounts_travel_as_documents():
    for account in (BYSTANDER, NEWCOMER):
        document = json.loads(json.dumps(account.document()))
        assert RankAccount.of_document(document) == account


def test_a_resumption_replays_nothing():
    account = RecoveryAccount(2, Verdict.RESUME, (), 9, Level.CONSISTENT, [BYSTANDER])
    assert account.verified
    assert account.line.startswith("generation 2: RESUME, resumed at step 9, 6.3 s (teardown 0.5")
    assert account.line.endswith("guarantee CONSISTENT")


def test_copies_that_are_still_on_their_way_are_told():
    ranks = [dataclasses.replace(each, owed_copies=4) for each in (BYSTANDER, NEWCOMER)]
    account = dataclasses.replace(ACCOUNT, ranks=ranks)
    assert account.line == f"{ACCOUNT.line}, 8 copies on their way"
