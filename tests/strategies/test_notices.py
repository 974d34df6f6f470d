# SPDX-License-Identifier: Apache-2.0
"""Lines that somebody should act on are warnings, so that they are shown at level 30, too."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch

from megatron_moevement.policy.copies.protection_level import JobShape
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.observation.events import Events
from megatron_moevement.runtime.observation.log import open_log
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.strategies.moevement.capture.replica_audit import ReplicaAudit
from megatron_moevement.strategies.moevement.protection import protection_watch
from megatron_moevement.strategies.moevement.protection.protection_watch import ProtectionWatch
from megatron_moevement.strategies.moevement.recovery.planning import Planning
from megatron_moevement.training.protection import first_rank_notices
from tests.harness.job_facts import Job, changed, without_processes
from tests.harness.log_lines import log_lines
from tests.harness.one_of_many import one_of_many

WARN = logging.WARNING


def without_scalars(facts):
    """Returns facts of which no process has the ledger of the first step."""
    gaps = {
        each.process: dataclasses.replace(each, ledger=range(2, 3))
        for each in facts.processes
        if each.rank is not None
    }
    return changed(facts, gaps)


def lost_at(step, keep_scalars):
    """Returns the facts of a job of two stages that has lost one, before any window was whole."""
    facts = without_processes(Job(Layout(pp=2), step=step, durable=0).facts(), {0})
    return facts if keep_scalars else without_scalars(facts)


def planned(monkeypatch, facts, number):
    """Plans on one rank as a job does."""
    session = SimpleNamespace(
        objects=SimpleNamespace(
            device=torch.device("cpu"), faults=SimpleNamespace(strike_outside=lambda _: None)
        ),
        memory=SimpleNamespace(generation=SimpleNamespace(number=facts.generation)),
        carried=SimpleNamespace(agreed=None),
        events=SimpleNamespace(keep=lambda *_: None, emit=lambda *_, **__: None),
        notices=first_rank_notices(),
        tiers=None,
    )
    own = Planning(session, None)
    monkeypatch.setattr(own, "_look", lambda _: facts)
    monkeypatch.setattr(own, "_finds_more", lambda: False)
    with one_of_many(2, number):
        return own.start(Durable()).plan


@pytest.mark.parametrize(
    ("keep_scalars", "level", "number", "shown"),
    [
        (False, logging.INFO, 0, [("WARNING", "ROLLBACK")]),
        (False, WARN, 0, [("WARNING", "ROLLBACK")]),
        (False, WARN, 1, []),
        (True, logging.INFO, 0, [("INFO", "GLOBAL")]),
        (True, WARN, 0, []),
    ],
)
def test_steps_that_are_lost_are_shown_at_the_level_of_warnings(
    monkeypatch, capsys, keep_scalars, level, number, shown
):
    with open_log("pretrain_moe.py", "rank 0", level):
        plan = planned(monkeypatch, lost_at(2, keep_scalars), number)
    assert plan.lost_steps == (0 if keep_scalars else 2)
    told = list(log_lines(capsys.readouterr().err))
    assert [(line.level, line.text.partition(": ")[0]) for line in told] == shown
    assert all(line.text.endswith(plan.reason) for line in told)


@pytest.mark.parametrize(("copies", "is_full"), [(2, True), (1, False), (0, False)])
def test_protection_that_is_not_full_is_a_warning(monkeypatch, tmp_path, copies, is_full):
    said, warned = [], []
    monkeypatch.setattr(protection_watch, "forget_origin", lambda *_: None)
    shape = JobShape(stages=2, ends=Ends.INDEPENDENT, wanted=2, domains=3, spares=1)
    watch = ProtectionWatch(shape, Events(), Notices(said.append, warned.append), 0, ())
    memory = SimpleNamespace(
        store=SimpleNamespace(folder=tmp_path), copies=SimpleNamespace(holders=())
    )
    with one_of_many(2, 0):
        watch.at_edge(8, Window(4, 4), copies, memory)
    (line,) = said if is_full else warned
    assert line.startswith("step 8: protection: ")
    assert (said == []) is not is_full


@pytest.mark.parametrize(("interval", "is_whole"), [(None, False), (8, True), (8, False)])
def test_an_audit_that_compares_nothing_is_a_warning(interval, is_whole):
    said, warned = [], []
    objects = SimpleNamespace(optimizer=SimpleNamespace(is_state_whole=is_whole))
    ReplicaAudit(interval, objects, Events(), Notices(said.append, warned.append))
    assert said == []
    expected = interval is not None and not is_whole
    assert [line.startswith("--moevement-audit-interval") for line in warned] == [True] * expected
