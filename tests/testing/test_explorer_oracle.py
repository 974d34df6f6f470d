# SPDX-License-Identifier: Apache-2.0
"""The oracle finds nothing in what a good run left, and each broken promise in a doctored one."""

import dataclasses
import os

import pytest

from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.policy.recovery.recovery_planner import plan_recovery
from megatron_moevement.runtime.observation.events import EventLog, EventName
from megatron_moevement.settings.faults import Fault
from tests.harness.doctored_run import (
    DIGEST,
    DURABLE,
    LOST,
    SCENARIO,
    Run,
    RunThatGoesBack,
)
from tests.harness.explorer.job import Protection, Training
from tests.harness.explorer.oracle import CHECKS
from tests.harness.explorer.oracle import judge as judge_by_all
from tests.harness.explorer.outcome import Killed
from tests.harness.explorer.timeline import PersistedWindow, Timeline
from tests.harness.explorer.verdicts_of_recoveries import check_lost_work

OTHER_CHECKS = {name: check for name, check in CHECKS.items() if name != "account"}
"""What is doctored has no processes whose time could be accounted for: test_accounts.py."""


def judge(scenario, outcome):
    return judge_by_all(scenario, outcome, OTHER_CHECKS)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_good_run_has_no_complaint(run, monkeypatch):
    assert run.plan.verdict.value == "LOCALIZED"
    assert judge(SCENARIO, run.outcome(monkeypatch)) == []


def _another_plan(run):
    run.plan_fields = {"digest": "0" * 64}


def _another_step(run):
    run.goes_on_with += 1


def _without_copies(run):
    run.copies = 0


def _other_bits(run):
    run.digest = {**DIGEST, "losses": {"1": "c"}}


def _no_end(run):
    run.digest = None


def _hangs(run):
    run.timed_out = True


def _innocent(run):
    run.codes[2] = -9


def _left(run):
    run.left = ("abc/process-0/journal",)


def _outlived(run):
    run.orphans = ("python 77, listens at 29500",)


def _traceback(run):
    run.said[0] = "Traceback (most recent call last):\n  File 'x', line 1\nValueError: no\n"


def _unverified(run):
    run.verified = False


def _twice(run):
    run.replayed += run.replayed[-1:]


def _too_far_back(run):
    run.replayed = [run.replayed[0] - 1, *run.replayed]


def _busy_bystander(run):
    run.passes = 3


def _lost_steps(run):
    run.newest = 16


def _stopped_and_went_on(run):
    run.codes[3] = 75


@pytest.mark.parametrize(
    ("doctor", "check"),
    [
        (_another_plan, "plans"),
        (_another_step, "targets"),
        (_without_copies, "copies"),
        (_other_bits, "bits"),
        (_no_end, "bits"),
        (_hangs, "time"),
        (_innocent, "ends"),
        (_stopped_and_went_on, "ends"),
        (_left, "leftovers"),
        (_outlived, "leftovers"),
        (_traceback, "output"),
        (_unverified, "replays"),
        (_twice, "replays"),
        (_too_far_back, "replays"),
        (_busy_bystander, "replays"),
        (_lost_steps, "lost work"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_what_is_not_as_promised_is_found(run, monkeypatch, doctor, check):
    doctor(run)
    found = {complaint.check for complaint in judge(SCENARIO, run.outcome(monkeypatch))}
    assert found == {check}


@pytest.mark.parametrize(
    ("faults", "found"),
    [
        pytest.param((), {"ends"}, id="all struck"),
        pytest.param((Fault.parse("9:forward@0#3"),), set(), id="one never struck"),
    ],
)
def test_who_prints_that_a_fault_never_struck_may_be_killed_just_then(
    run, monkeypatch, faults, found
):
    run.faults = faults
    run.codes = [1, -9, 1, 1, 0]
    complaints = judge(SCENARIO, run.outcome(monkeypatch))
    assert {complaint.check for complaint in complaints} == found


@pytest.mark.parametrize(
    ("said", "found"), [("process 4 stops: why; it keeps no state of the job", []), ("", ["ends"])]
)
def test_one_that_stops_without_state_has_not_trained_to_the_end(run, monkeypatch, said, found):
    """A fault that never struck makes 1 the code of those that did."""
    run.faults = (Fault.parse("9:forward@0#3"),)
    run.codes = [75, -9, 75, 75, 1]
    outcome = run.outcome(monkeypatch)
    (outcome.launches[0].folder / "rank4.stderr").write_text(said)
    complaints = judge(SCENARIO, outcome)
    assert [one.check for one in complaints if one.check == "ends"] == found


@pytest.mark.parametrize(
    ("killed_at", "more", "is_found"),
    [
        pytest.param(200.0, (), False, id="nobody is there afterwards"),
        pytest.param(90.0, (), True, id="others go on"),
        pytest.param(200.0, ("abc/process-2/journal",), True, id="another one's, too"),
    ],
)
def test_who_is_killed_behind_the_last_step_may_leave_its_memory(
    run, monkeypatch, killed_at, more, is_found
):
    run.left = ("abc", f"abc/process-{LOST}", f"abc/process-{LOST}/journal", *more)
    run.killed_at = killed_at
    training = Training(steps=run.newest)
    scenario = dataclasses.replace(
        SCENARIO, job=dataclasses.replace(SCENARIO.job, training=training)
    )
    complaints = judge(scenario, run.outcome(monkeypatch))
    assert {complaint.check for complaint in complaints} == ({"leftovers"} if is_found else set())


@pytest.mark.parametrize("forgot", [True, False])
def test_who_loses_its_memory_behind_the_last_step_may_leave_the_folder_of_the_run(
    run, monkeypatch, forgot
):
    run.left = ("abc",)
    training = Training(steps=run.newest)
    scenario = dataclasses.replace(
        SCENARIO, job=dataclasses.replace(SCENARIO.job, training=training)
    )
    outcome = run.outcome(monkeypatch)
    killed = (Killed(LOST, 200.0, forgot),)
    launch = dataclasses.replace(outcome.launches[0], killed=killed)
    complaints = judge(scenario, dataclasses.replace(outcome, launches=(launch,)))
    assert {complaint.check for complaint in complaints} == (set() if forgot else {"leftovers"})


@pytest.fixture
def back(tmp_path):
    return RunThatGoesBack(tmp_path)


def _loses_memory(outcome, run):
    launch = dataclasses.replace(outcome.launches[0], killed=run.forgets(), exit_codes=CODES)
    return dataclasses.replace(outcome, launches=(launch,))


CODES = (-9, -9, -9, -9, 0)


def test_lost_steps_that_are_said_are_no_complaint_where_all_memory_is_lost(back, monkeypatch):
    assert back.plan.verdict is Verdict.ROLLBACK
    assert back.plan.lost_steps == back.newest - DURABLE
    assert judge(SCENARIO, _loses_memory(back.outcome(monkeypatch), back)) == []


def test_a_generation_may_build_its_objects_anew_and_gather_facts_again(back, monkeypatch):
    """Its line tells what was found first."""
    back.before = back.found_first
    before = plan_recovery(back.before)
    assert before.reason != back.plan.reason
    back.plan_fields = {"digest": before.digest}
    back.said[0] = f"ROLLBACK: {before.reason}\n"
    assert judge(SCENARIO, _loses_memory(back.outcome(monkeypatch), back)) == []


def test_lost_steps_that_nobody_says_are_found(back, monkeypatch):
    back.said = {}
    complaints = judge(SCENARIO, _loses_memory(back.outcome(monkeypatch), back))
    assert [one.check for one in complaints] == ["lost work"]
    assert "nobody says" in complaints[0].detail


@pytest.mark.parametrize(
    ("said", "found"), [("process 4 stops: why; it keeps no state of the job", []), ("", [1])]
)
def test_a_launch_that_finds_nothing_can_not_say_that_steps_are_lost(
    back, monkeypatch, said, found
):
    """Whoever outlives the launch before says it."""
    outcome = _loses_memory(back.outcome(monkeypatch), back)
    later = back.folder / "launch1"
    (later / "events").mkdir(parents=True)
    processes = tuple(
        dataclasses.replace(one, committed=None, ledger=range(0)) for one in back.facts.processes
    )
    back.facts = dataclasses.replace(back.facts, processes=processes, generation=0, durable=0)
    back.is_written(later / "events", 500.0, monkeypatch)
    (former,) = outcome.launches
    (former.folder / "rank4.stderr").write_text(said)
    launch = dataclasses.replace(former, folder=later, killed=())
    outcome = dataclasses.replace(outcome, launches=(former, launch))
    timeline = Timeline(outcome, SCENARIO.job.protection)
    complaints = [
        one for one in check_lost_work(SCENARIO, outcome, timeline) if one.startswith("launch 1")
    ]
    assert [1 for one in complaints if "nobody says so" in one] == found


@pytest.mark.parametrize("more", [2, -3])
def test_another_number_of_lost_steps_than_is_said_is_found(back, monkeypatch, more):
    back.newest += more
    complaints = judge(SCENARIO, _loses_memory(back.outcome(monkeypatch), back))
    assert [one.check for one in complaints] == ["lost work"]
    assert f"{back.newest - DURABLE} committed steps are lost and" in complaints[0].detail


def test_a_recovery_that_nobody_planned_is_found(run, monkeypatch):
    run.plan_fields = None
    complaints = judge(SCENARIO, run.outcome(monkeypatch))
    assert [one.check for one in complaints] == ["plans"]
    assert "no LOCALIZED was planned" in complaints[0].detail


def test_a_recovery_without_facts_is_found(run, monkeypatch):
    outcome = run.outcome(monkeypatch)
    for facts in outcome.launches[0].event_dir.glob("*.json"):
        facts.unlink()
    assert [one.check for one in judge(SCENARIO, outcome)] == ["targets"]


def test_what_was_persisted_before_windows_began_anew_protects_no_more(run, monkeypatch):
    """A rollback, and the loss of a rank before a window of the new history is persisted."""
    outcome = run.outcome(monkeypatch)
    (launch,) = outcome.launches
    timeline = Timeline(outcome, SCENARIO.job.protection)
    assert timeline.persisted_before(100.0) == PersistedWindow(9, 11.01, 2)
    back = RunThatGoesBack(run.folder / "back")
    back.is_written(launch.event_dir, 50.0, monkeypatch)
    assert Timeline(outcome, SCENARIO.job.protection).persisted_before(100.0) is None
    timeline = Timeline(outcome, SCENARIO.job.protection)
    assert timeline.persisted_before(12.5) == PersistedWindow(9, 11.01, 2)


@pytest.mark.parametrize(("adopts", "lost"), [(False, 5), (True, 0)])
def test_without_adoption_a_launch_that_is_restarted_before_it_looks_has_no_memory(
    run, monkeypatch, adopts, lost
):
    outcome = run.outcome(monkeypatch)
    (launch,) = outcome.launches
    former = dataclasses.replace(launch, folder=run.folder / "former", killed=())
    outcome = dataclasses.replace(outcome, launches=(former, launch))
    timeline = Timeline(outcome, Protection(adopts=adopts))
    (recovery,) = timeline.recoveries
    assert (recovery.launch, recovery.facts.generation) == (1, 1)
    assert timeline.memories_lost(recovery, since=0.0) == lost


@pytest.mark.parametrize(
    ("adopts", "since", "lost"), [(False, 0.0, 4), (False, 100.0, 0), (True, 0.0, 0)]
)
def test_without_adoption_a_launch_that_is_restarted_has_nothing_of_former_spares(
    run, monkeypatch, adopts, since, lost
):
    """One died in place, and three more processes than ranks were in the launch before."""
    outcome = run.outcome(monkeypatch)
    (launch,) = outcome.launches
    pids = tuple(range(SCENARIO.job.layout.ranks + 3))
    former = dataclasses.replace(launch, folder=run.folder / "former", killed=(), pids=pids)
    outcome = dataclasses.replace(outcome, launches=(former, launch))
    timeline = Timeline(outcome, Protection(adopts=adopts))
    (recovery,) = timeline.recoveries
    looked = dataclasses.replace(
        recovery, time=recovery.time - 1, facts=dataclasses.replace(recovery.facts, generation=0)
    )
    timeline.recoveries.insert(0, looked)
    assert timeline.memories_lost(recovery, since=since) == lost


def test_one_whose_exception_did_not_end_it_dies_where_no_event_is_written(run, monkeypatch):
    run.said[0] = "--moevement-faults: kill:9:connect@0#0\n"
    outcome = run.outcome(monkeypatch)
    (launch,) = outcome.launches
    with EventLog(launch.folder / "events", 0, 0) as events:
        events.emit(EventName.FAULT_INJECTED, 8, kind="exception", place="after-barrier")
    launch = dataclasses.replace(launch, pids=(os.getpid(), *launch.pids[1:]))
    timeline = Timeline(dataclasses.replace(outcome, launches=(launch,)), Protection())
    assert {death.process for death in timeline.deaths} == {0, LOST}


@pytest.mark.parametrize(("domain", "lost"), [(1, 4), (2, 2), (4, 1)])
def test_processes_of_a_failure_domain_are_lost_together(back, monkeypatch, domain, lost):
    outcome = _loses_memory(back.outcome(monkeypatch), back)
    timeline = Timeline(outcome, Protection(domain=domain))
    (recovery,) = timeline.recoveries
    assert timeline.memories_lost(recovery, since=0.0) == lost


def test_more_restarts_than_strikes_are_found(run, monkeypatch):
    run.of_generation(2)
    found = {complaint.check for complaint in judge(SCENARIO, run.outcome(monkeypatch))}
    assert found == {"restarts"}


def test_an_exception_on_purpose_is_no_strange_traceback(run, monkeypatch):
    error = "x.InjectedFaultError: an exception on purpose"
    run.said[0] = f"Traceback (most recent call last):\n  File 'x', line 1\n{error}\n"
    assert judge(SCENARIO, run.outcome(monkeypatch)) == []


def test_facts_of_which_the_policy_makes_another_plan_are_found(run, monkeypatch):
    processes = tuple(dataclasses.replace(one, ledger=range(13, 14)) for one in run.facts.processes)
    run.facts = dataclasses.replace(run.facts, processes=processes)
    found = {complaint.check for complaint in judge(SCENARIO, run.outcome(monkeypatch))}
    assert "plans" in found


@pytest.mark.parametrize(
    ("copies", "spares_alone", "durable", "is_found"),
    [(3, False, 5, False), (4, False, 8, True), (4, True, 8, False), (4, True, 5, True)],
)
def test_copies_that_spares_keep_count(back, monkeypatch, copies, spares_alone, durable, is_found):
    new = tuple(dataclasses.replace(one, is_new=spares_alone) for one in back.facts.processes)
    back.facts = dataclasses.replace(back.facts, durable=durable, processes=new)
    back.copies = copies  # 4 of 5 processes lose their memory
    back.planned()
    back.said[0] = f"ROLLBACK: {back.plan.reason}\n"
    protection = dataclasses.replace(SCENARIO.job.protection, replicas=4)
    job = dataclasses.replace(SCENARIO.job, protection=protection)
    outcome = _loses_memory(back.outcome(monkeypatch), back)
    found = judge(dataclasses.replace(SCENARIO, job=job), outcome)
    assert {one.check for one in found} == ({"lost work"} if is_found else set())
