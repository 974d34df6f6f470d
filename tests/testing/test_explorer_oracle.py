"""The oracle finds nothing in what a good run left, and each broken promise in a doctored one."""

import dataclasses

import pytest

from megatron_moevement.policy.facts import Condition, LiveState
from megatron_moevement.policy.facts_document import FACTS, dump_facts
from megatron_moevement.policy.plan import Verdict
from megatron_moevement.policy.ranks import Layout as RankLayout
from megatron_moevement.policy.recovery import plan_recovery
from megatron_moevement.runtime.events import EventLog, EventName
from megatron_moevement.settings.faults import Fault
from megatron_moevement.testing.explorer.history import History, Launch
from megatron_moevement.testing.explorer.job import DrawnJob, Layout, Protection, Training
from megatron_moevement.testing.explorer.oracle import judge
from megatron_moevement.testing.explorer.outcome import Killed, LaunchOutcome, Outcome
from megatron_moevement.testing.explorer.scenario import Scenario
from megatron_moevement.testing.explorer.timeline import PersistedWindow, Timeline
from megatron_moevement.testing.job_facts import Job, without_processes

JOB = Job(RankLayout(pp=4), step=13)
LOST = 1
DIGEST = {"iteration": 20, "operators": {"one": "a"}, "losses": {"1": "b"}}
SCENARIO = Scenario(
    None,
    DrawnJob(layout=Layout(pp=4), protection=Protection(window=3, replicas=2, adopts=False)),
    History((Launch(spares=1),)),
)


class Run:
    """Writes what a run left in which one process was killed, and its stage replayed."""

    def __init__(self, folder):
        self.folder = folder
        self.of_generation(1)
        self.codes = [0, -9, 0, 0, 0]
        self.digest = DIGEST
        self.left = ()
        self.orphans = ()
        self.killed_at = 90.0
        self.before = None
        self.said = {}
        self.faults = ()
        self.timed_out = False
        self.replayed = list(range(self.plan.start(LOST) + 1, self.plan.target + 1))
        self.verified = True
        self.passes = 0
        self.clock = 0.0
        self.newest = 13
        self.copies = 2

    def of_generation(self, generation):
        """Writes down the facts of a generation, and what the policy makes of them."""
        facts = without_processes(JOB.facts(), {LOST})
        self.facts = dataclasses.replace(facts, generation=generation)
        self.planned()

    def planned(self):
        """Writes down what the policy makes of the facts."""
        self.plan = plan_recovery(self.facts)
        self.plan_fields = {"digest": self.plan.digest}

    def outcome(self, monkeypatch):
        launch = self.folder / "launch0"
        (launch / "events").mkdir(parents=True)
        monkeypatch.setattr("time.time", self._now)
        monkeypatch.setattr("time.time_ns", lambda: int(self._now() * 1e9))
        for rank in range(4):
            self._train(rank, launch / "events")
        self.clock = 100.0
        self._gather(launch / "events", self.facts if self.before is None else self.before)
        for rank in range(4):
            self._plan(rank, launch / "events")
        if self.before is not None:
            self._gather(launch / "events", self.facts)
        for rank in range(4):
            self._recover(rank, launch / "events")
        for process, text in self.said.items():
            (launch / f"rank{process}.stderr").write_text(text)
        ended = LaunchOutcome(
            launch=dataclasses.replace(SCENARIO.history.launches[0], faults=self.faults),
            folder=launch,
            pids=(10, 11, 12, 13, 14),
            exit_codes=tuple(self.codes),
            timed_out=self.timed_out,
            seconds=1.0,
            killed=(Killed(LOST, self.killed_at, False),),
            missed=0,
            left=self.left,
            orphans=self.orphans,
        )
        return Outcome((ended,), DIGEST, self.digest)

    def _now(self):
        self.clock += 0.01
        return self.clock

    def _train(self, rank, folder):
        self.clock = 1.0
        with EventLog(folder, rank, 0) as events:
            for step in range(1, self.newest + 1):
                self.clock = step
                events.emit(EventName.ITERATION, step)
                if step == 12:
                    window = {"start": 9, "size": 3, "lag": 1, "copies": self.copies}
                    events.emit(EventName.WINDOW_PERSISTED, step, **window)

    def _gather(self, folder, facts):
        self.clock += 0.01
        with EventLog(folder, 0, facts.generation) as events:
            events.keep(FACTS, dump_facts(facts))

    def _plan(self, rank, folder):
        with EventLog(folder, rank, self.facts.generation) as events:
            fields = {
                "verdict": self.plan.verdict.value,
                "target": self.plan.target,
                **(self.plan_fields or {}),
            }
            if self.plan_fields is not None:
                events.emit(EventName.PLAN, 13, **fields)

    def _recover(self, rank, folder):
        with EventLog(folder, rank, self.facts.generation) as events:
            replays = self.replayed if rank == LOST else []
            for step in replays:
                events.emit(EventName.REPLAY, step, replay_verified=self.verified)
            events.emit(
                EventName.RECOVERED,
                13,
                replayed_steps=self.plan.target - self.plan.start(LOST) if rank == LOST else 0,
                forward_passes=6 if rank == LOST else self.passes,
                backward_passes=0,
            )


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_good_run_has_no_complaint(run, monkeypatch):
    assert run.plan.verdict.value == "LOCALIZED"
    assert judge(SCENARIO, run.outcome(monkeypatch)) == []


def _another_plan(run):
    run.plan_fields = {"digest": "0" * 64}


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


DURABLE = 8


class RunThatGoesBack(Run):
    """A run in which all memory is lost, that goes back to a durable checkpoint."""

    def __init__(self, folder):
        super().__init__(folder)
        processes = tuple(dataclasses.replace(one, persisted=None) for one in self.facts.processes)
        self.found_first = dataclasses.replace(self.facts, processes=processes, durable=DURABLE)
        processes = tuple(
            dataclasses.replace(one, holdings=(), live=LiveState(Condition.ABSENT))
            for one in processes
        )
        self.facts = dataclasses.replace(self.found_first, processes=processes)
        self.planned()
        self.replayed = []
        self.passes = 0
        self.said[0] = f"pretrain_moe.py: ROLLBACK: {self.plan.reason}\n"

    def is_written(self, folder, at, monkeypatch):
        """Writes the facts of this recovery into a folder of events, as of some time."""
        monkeypatch.setattr("time.time_ns", lambda: int(at * 1e9))
        with EventLog(folder, 0, 1) as events:
            events.keep(FACTS, dump_facts(self.facts))

    def forgets(self):
        """Loses the memory of more processes than there are copies."""
        return tuple(Killed(process, 90.0, True) for process in range(4))


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
    back.said[0] = f"pretrain_moe.py: ROLLBACK: {before.reason}\n"
    assert judge(SCENARIO, _loses_memory(back.outcome(monkeypatch), back)) == []


def test_lost_steps_that_nobody_says_are_found(back, monkeypatch):
    back.said = {}
    complaints = judge(SCENARIO, _loses_memory(back.outcome(monkeypatch), back))
    assert [one.check for one in complaints] == ["lost work"]
    assert "nobody says" in complaints[0].detail


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
    back.said[0] = f"pretrain_moe.py: ROLLBACK: {back.plan.reason}\n"
    protection = dataclasses.replace(SCENARIO.job.protection, replicas=4)
    job = dataclasses.replace(SCENARIO.job, protection=protection)
    outcome = _loses_memory(back.outcome(monkeypatch), back)
    found = judge(dataclasses.replace(SCENARIO, job=job), outcome)
    assert {one.check for one in found} == ({"lost work"} if is_found else set())
