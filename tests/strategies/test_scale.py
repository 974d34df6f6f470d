# SPDX-License-Identifier: Apache-2.0
"""What a recovery costs each rank grows with the ranks of the job, and not with their square."""

import dataclasses
import gc
import sys
from types import SimpleNamespace

import pytest

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.facts import facts_document
from megatron_moevement.policy.facts.facts_document import ProcessReader, dump_process
from megatron_moevement.policy.job import guarantee
from megatron_moevement.policy.job.operators import Operator, OperatorId
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.recovery import recovery_planner
from megatron_moevement.policy.recovery.newest_state import Durable
from megatron_moevement.policy.window import skipping_schedule
from megatron_moevement.runtime.coordination import agreement
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.moevement.agreed_guarantee import agree_on_guarantee, judge
from megatron_moevement.strategies.moevement.carried_state import CarriedState
from megatron_moevement.strategies.moevement.protection import members
from megatron_moevement.strategies.moevement.protection.job_plan import Found, PlannedJob, plan_of
from megatron_moevement.strategies.moevement.protection.left_state import gather_facts
from megatron_moevement.strategies.moevement.protection.members import Member
from megatron_moevement.strategies.moevement.recovery import planning
from megatron_moevement.strategies.moevement.recovery.planning import Planning
from tests.harness.one_of_many import Values, one_of_many
from tests.harness.scaled_recovery import CPU, Kind, ScaledRecovery, Told

RANKS = 128
MAX_RATIO = 2.3
MAX_OBJECTS = 6.5
SETTINGS = FaultTolerance(moevement_window=3)


def instructions_of(act):
    """Returns how many instructions of Python an action executes, loops within a line included."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def work_of(ranks, kind):
    """Returns for each part the instructions that a rank executes, and the bytes it receives."""
    recovery = ScaledRecovery(ranks, kind)
    with one_of_many(ranks, recovery.number) as group:
        for _, act in recovery.parts(group):  # what is computed once in a process is not counted
            act()
        recovery.forget()
        work = {}
        for part, act in recovery.parts(group):
            instructions = instructions_of(act)
            work[part] = instructions, group.received_bytes
    return work


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", Kind)
def test_twice_the_ranks_are_twice_the_work_in_each_part_of_a_recovery(kind):
    few, many = work_of(RANKS, kind), work_of(2 * RANKS, kind)
    assert few.keys() == many.keys()
    for part, costs in few.items():
        for what, once, twice in zip(("instructions", "bytes"), costs, many[part], strict=True):
            assert twice <= MAX_RATIO * once, (part, what, once, twice)


def counted(monkeypatch, module, name):
    """Returns the arguments of all calls of a function of a module from now on."""
    calls, act = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(args), act(*args))[1])
    return calls


def test_a_recovery_is_planned_once(monkeypatch):
    plans = counted(monkeypatch, recovery_planner, "plan_recovery")
    looked = [
        counted(monkeypatch, module, "of_newest_history") for module in (planning, recovery_planner)
    ]
    told, kept = Told(RANKS), []
    session = SimpleNamespace(
        objects=SimpleNamespace(device=CPU, faults=SimpleNamespace(strike_outside=kept.append)),
        memory=SimpleNamespace(generation=SimpleNamespace(number=told.facts.generation)),
        carried=SimpleNamespace(agreed=None),
        events=SimpleNamespace(keep=lambda *args: kept.append(args), emit=lambda *_, **__: None),
        notices=Notices(kept.append, kept.append),
        tiers=None,
    )
    own = Planning(session, None)
    monkeypatch.setattr(own, "_look", lambda _: told.facts)
    with one_of_many(RANKS, 0):
        agreed = own.start(Durable())
    assert len(plans) == 1
    (raw,), derived = looked  # where nothing is found to leave out
    assert raw[0] is told.facts
    assert {id(facts) for (facts,) in derived} == {id(agreed.facts)}
    assert session.carried.agreed is agreed
    assert agreed.plan.digest == recovery_planner.plan_start(told.facts).digest
    assert kept[0][0] == "facts"  # written down before anything is done


def test_what_ranks_compute_with_alike_is_looked_at_once(monkeypatch):
    job, carried = Told(64).computations, CarriedState()
    first = agree_on_guarantee(job, [None], carried)
    looked_at = counted(monkeypatch, guarantee, "_chance")
    judged = judge(job, carried)
    assert agree_on_guarantee(job, [judged, None], carried) == first
    assert len(looked_at) == 1


def test_of_what_ranks_tell_of_themselves_one_document_is_there_at_a_time(monkeypatch):
    told, order = Told(64).facts, []
    published = [[dump_process(each)] for each in told.processes[:64]]
    decode, load = agreement.json.loads, ProcessReader.load
    monkeypatch.setattr(
        agreement.json, "loads", lambda text: (order.append("decoded"), decode(text))[1]
    )
    monkeypatch.setattr(ProcessReader, "load", lambda *args: (order.append("read"), load(*args))[1])
    with one_of_many(64, 0) as group:
        group.script(Values(published))
        facts = gather_facts(dataclasses.replace(told, processes=told.processes[:1]), CPU)
    assert facts == dataclasses.replace(told, processes=told.processes[:64])
    assert order == ["decoded", "read"] * 64


def kept_objects(ranks, kind):
    """Returns how many objects a collector of garbage looks through of what a recovery has made."""
    recovery = ScaledRecovery(ranks, kind)
    with one_of_many(ranks, recovery.number) as group:
        for _, act in recovery.parts(group):  # what there is once in a process is not counted
            act()
        recovery.forget()
        gc.collect()
        before = len(gc.get_objects())
        for _, act in recovery.parts(group):
            act()
        gc.collect()
        return len(gc.get_objects()) - before


@pytest.mark.parametrize("kind", Kind)
def test_few_objects_are_kept_of_each_rank(kind):
    # The collector looks through all of them again and again while they become more.
    few, many = (kept_objects(ranks, kind) for ranks in (512, 1024))
    assert many - few < MAX_OBJECTS * 512


@pytest.mark.parametrize("kind", Kind)
def test_what_ranks_have_in_common_is_there_once(kind):
    ranks = 1024  # of which two replicas each capture the same
    recovery = ScaledRecovery(ranks, kind)
    with one_of_many(ranks, recovery.number) as group:
        for part, act in recovery.parts(group):
            act()
            if part == "introduction":
                break
    told = recovery._introduced
    computations = told.computations.by_rank
    assert len(set(map(id, computations))) == len(set(map(str, computations))) < ranks
    sizes = [each.sizes for each in told.members]
    assert len(set(map(id, sizes))) == len(set(sizes)) < ranks
    assert told.computations == recovery.told.computations
    assert told.members == recovery.told.members


def test_equal_parts_of_facts_are_read_once(monkeypatch):
    told = Told(64).facts
    published = [dump_process(each) for each in told.processes]
    extents = counted(monkeypatch, facts_document, "LogExtent")
    windows = counted(monkeypatch, facts_document, "Window")
    slots = counted(monkeypatch, facts_document, "Holding")
    ProcessReader().load(published, "facts")  # what is known from other tests is not made at all
    distinct = {held for each in told.processes for held in each.holdings}
    assert len(slots) == len(distinct) < sum(len(each.holdings) for each in told.processes)
    assert len(extents) <= len({log for each in told.processes for log in each.logs})
    assert len(windows) <= len({held.window for each in told.processes for held in each.holdings})


def test_sizes_that_ranks_have_in_common_are_read_once(monkeypatch):
    made = counted(monkeypatch, members, "Operator")
    job = job_of(12, 12, 36)
    same = [dataclasses.replace(each, sizes=job.members[0].sizes) for each in job.members[:2]]
    shared = dataclasses.replace(job, members=[*same, job.members[2]])
    made.clear()
    plan = plan_of(shared)
    assert len(made) == 6
    assert len(plan.schedule.inventory.by_rank) == 3


def job_of(*full_bytes, restarted=0, settings=SETTINGS):
    """Returns a job of ranks that hold a replica of two operators and one more each."""
    gates = [OperatorId.parse(f"layers.{layer}.gate") for layer in range(len(full_bytes) + 2)]
    members = [
        Member.of(
            Host(number + restarted, f"node{number + restarted}", LogicalRank(dp=number)),
            [Operator(gates[place], size, 2) for place in (0, 1, number + 2)],
            1000,
            5,
        )
        for number, size in enumerate(full_bytes)
    ]
    return PlannedJob(settings, members, Ends.INDEPENDENT, 100)


def test_a_schedule_stays_over_restarts_and_other_hosts_get_other_copies():
    job, again = job_of(12, 24, 36), job_of(12, 24, 36, restarted=1)
    former = plan_of(job)
    plan = plan_of(again, 1, former)
    assert plan.schedule is former.schedule
    assert plan == plan_of(again, 1)
    assert plan.placement != former.placement


@pytest.mark.parametrize(
    "other",
    [
        job_of(12, 24, 40),
        job_of(12, 24),
        PlannedJob(SETTINGS, job_of(12, 24, 36).members, Ends.INDEPENDENT, 101),
        PlannedJob(
            FaultTolerance(moevement_window=2), job_of(12, 24, 36).members, Ends.INDEPENDENT, 100
        ),
    ],
)
def test_another_job_is_planned_anew(other):
    former = plan_of(job_of(12, 24, 36))
    plan = plan_of(other, 1, former)
    assert plan == plan_of(other, 1)
    assert plan.basis != former.basis


def test_a_newcomer_comes_to_the_schedule_of_the_others():
    job = job_of(12, 24, 36)
    former = plan_of(job)
    found = Found.of(job, former)
    assert plan_of(job, 0, None, found) == former
    assert plan_of(job, 0, None, found).schedule.digest == former.schedule.digest
    other = plan_of(job, 0, None, found._replace(slots=[(slot + 1) % 3 for slot in found.slots]))
    assert other.schedule.digest != former.schedule.digest
    larger = [room.beside(4096, 1) for room in found.room]
    assert plan_of(job, 0, None, found._replace(room=larger)).rings != former.rings


def test_a_newcomer_plans_no_window(monkeypatch):
    job = job_of(12, 12, 36, settings=FaultTolerance())
    former = plan_of(job)
    monkeypatch.setattr(skipping_schedule, "plan_window", lambda *_, **__: pytest.fail("planned"))
    assert plan_of(job, 1, None, Found.of(job, former)) == plan_of(job, 1, former)
