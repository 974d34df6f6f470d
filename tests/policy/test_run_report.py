# SPDX-License-Identifier: Apache-2.0
"""The report of a run: who was lost, what each outage cost, and that everything adds up."""

import functools
import itertools
from collections import Counter

import pytest

from megatron_moevement.policy.accounting.event import EventName
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.policy.report import holders
from megatron_moevement.policy.report.casualties import Casualty, summary
from megatron_moevement.policy.report.run_report import report_of
from tests.harness.synthetic_run import Shape, SyntheticRun

SMALL = Shape(layout=Layout(pp=2, dp=2), spares=3, steps=60, faults=5, seed=3)


def described(code):
    return f"ended with {code}"


def report(run, facts=()):
    histories = {
        str(place): functools.partial(list, records) for place, records in run.records.items()
    }
    return report_of(histories, facts, described)


@pytest.fixture(scope="module")
def run():
    return SyntheticRun(SMALL)


@pytest.fixture(scope="module")
def found(run):
    facts = [(at_ns // 1000, facts) for at_ns, facts in run.facts.items()]
    return report(run, facts)


def test_no_event_is_no_report():
    assert report_of({}, (), described) is None


def test_each_outage_names_who_was_lost_as_the_events_have_it(run, found):
    dead = [
        (record.fields["process"], record.fields["host"], record.fields["code"])
        for (_, process), records in run.records.items()
        if process == -1
        for record in records
        if record.fields["code"] not in {0, 75}
    ]
    listed = [
        (one["process"], one["host"], one["end"])
        for incident in found["incidents"]
        for one in incident["casualties"]
    ]
    assert len(found["incidents"]) == SMALL.faults
    assert sorted(listed) == sorted((*one[:2], described(one[2])) for one in dead)
    assert any(incident["is_relaunch"] for incident in found["incidents"])
    for incident in found["incidents"]:
        first = incident["casualties"][0]
        assert first["host"] in incident["summary"]
        assert f"rank {first['rank']} " in incident["summary"]


def test_the_parts_of_each_outage_add_up_to_it(found):
    for incident in found["incidents"]:
        assert sum(incident["parts_s"].values()) == pytest.approx(incident["duration_s"], abs=1e-9)
        assert incident["cost_rank_s"] == pytest.approx(4 * incident["duration_s"])
        if not incident["is_relaunch"]:
            assert incident["recovery"]["duration_s"] == pytest.approx(
                incident["duration_s"], rel=0.01
            )


def test_the_rows_of_the_timeline_add_up_to_the_time_of_the_job(found):
    wall_s = found["account"]["wall_s"]
    for row in found["timeline"]:
        assert sum(row["spans"][::2]) * row["unit_us"] / 1e6 == pytest.approx(wall_s, abs=2e-3)
    account = found["account"]
    total = sum(account["parts_s"].values())
    assert total == pytest.approx(wall_s * len(account["processes"]))
    ratio = account["parts_s"]["useful"] / (wall_s * account["ranks"])
    assert account["effective_training_time_ratio"] == pytest.approx(ratio)


def test_an_outage_has_its_plan_its_proof_and_the_holders_of_its_facts(found):
    incident = next(one for one in found["incidents"] if not one["is_relaunch"])
    assert incident["plan"]["reason"]
    assert incident["recovery"]["verified"]
    assert "equal" in incident["recovery"]["proof"]
    of_window = incident["holders"]
    assert of_window["copies"] == 1  # of two, one was lost
    first, last = of_window["window"]
    assert set(of_window["held"][0].values()) == {last - first + 1}
    assert found["layout"]["ranks_per_stage"] == 2


def test_holders_of_copies_are_there_from_the_start_and_with_each_change(found):
    placements = found["placements"]
    assert placements[0]["at"] < min(one["start"] for one in found["incidents"])
    assert all(a["ranks"] != b["ranks"] for a, b in itertools.pairwise(placements))
    for placement in placements:
        assert len(placement["ranks"]) == 4
        for process, those in placement["ranks"]:
            assert those
            assert process not in those


def test_of_many_ranks_holders_are_sums(run, monkeypatch, found):
    monkeypatch.setattr(holders, "DRAWN", 3)
    facts = [(at_ns // 1000, facts) for at_ns, facts in run.facts.items()]
    sums = report(run, facts)["placements"]
    assert len(sums) == len(found["placements"]) > 1
    assert sums[0]["changed"] == 0
    for one, whole in zip(sums, found["placements"], strict=True):
        kept = Counter(holder for _, those in whole["ranks"] for holder in those)
        assert (one["of"], one["fewest"]) == (4, min(len(those) for _, those in whole["ranks"]))
        assert (one["most"], one["at"]) == (max(kept.values()), whole["at"])
    for one, (before, after) in zip(sums[1:], itertools.pairwise(found["placements"]), strict=True):
        changed = [a != b for a, b in zip(before["ranks"], after["ranks"], strict=True)]
        assert one["changed"] == sum(changed) > 0


def test_protection_is_that_of_the_time_before_and_after(found):
    for incident in found["incidents"][1:-1]:
        before, after = incident["protection"]["before"], incident["protection"]["after"]
        assert before["start"] < incident["plan"]["target"] <= after["start"] + 3 * after["size"]


def test_a_level_of_protection_begins_with_the_first_rank_that_records_it(run, found):
    first = {}
    for (launch, _), records in run.records.items():
        for one in records:
            if one.event is EventName.PROTECTION:
                key = (launch, one.generation, one.iteration)
                first[key] = min(one.time, first.get(key, one.time))
    begun_s = found["begun_s"]
    expected = sorted(round(at - begun_s, 3) for at in first.values())
    assert [one["at"] for one in found["protection"]] == pytest.approx(expected, abs=1e-3)


def test_the_parts_are_those_of_a_process_that_the_others_waited_for(found):
    for incident in found["incidents"]:
        assert incident["parts_s"]["replay"] > 1
        assert incident["parts_s"]["wait"] < 0.1


def test_several_losses_are_named_by_their_host_or_counted():
    def lost(rank, host):
        return Casualty(process=rank, rank=rank, host=host, end="was killed")

    alone = [lost(3, "a"), lost(4, "b"), lost(5, "c")]
    assert summary(alone[:1]) == "rank 3 on a (process 3) was killed"
    assert summary(alone) == "rank 3 on a (process 3) was killed, and 2 more"
    together = [lost(3, "a"), lost(2, "a"), lost(4, "b")]
    assert summary(together) == (
        "a lost 2 processes (ranks 3, 2): rank 3 on a (process 3) was killed, and 1 more"
    )
    assert summary([]) is None


def test_curves_are_those_of_the_steps(run, found):
    steps = {
        record.iteration
        for records in run.records.values()
        for record in records
        if record.event is EventName.ITERATION
    }
    loss = found["curves"]["loss"]
    assert loss["steps"] == sorted(steps)
    assert "low" not in loss  # all ranks have the same
    memory = found["curves"]["host_bytes"]
    assert set(memory["rank"]) == {3}  # the synthetic rank with most of it
    assert found["evaluations"] == []


def test_a_job_that_stopped_names_the_first_process_that_ended():
    run = SyntheticRun(Shape(layout=SMALL.layout, spares=0, steps=30, faults=1, ends_well=False))
    found = report(run)
    ending = found["ending"]
    assert (found["account"]["faults"], found["incidents"]) == (1, [])
    assert ending["code"] == 75
    (lost,) = ending["casualties"]
    assert lost["host"].startswith("node")
    assert lost["line"].startswith(f"rank {lost['rank']} on {lost['host']}")


def test_a_run_that_goes_on_has_no_end():
    run = SyntheticRun(Shape(layout=SMALL.layout, steps=8, faults=0))
    del run.records[0, -1]
    found = report(run)
    assert found["ending"]["code"] is None
    assert found["incidents"] == []


def test_one_event_may_stand_for_several_steps(run):
    """Sums are divided by the number of steps, and each loss has its own step."""
    fields = dict(run.records[0, 0][-1].fields)
    record = next(one for one in run.records[0, 0] if one.event is EventName.ITERATION)
    fields = {**record.fields, "steps": 3, "losses": [5.0, "nan", 4.0]}
    fields |= {"duration_s": 3.0, "captured_bytes": 300, "stall_s": 0.0}
    several = type(record)(record.time, 0, 1, 0, 12, record.event, fields)
    curves = report_of({"a": lambda: [several]}, (), described)
    assert curves["curves"]["loss"]["steps"] == [10, 12]
    assert curves["curves"]["loss"]["mean"] == [5, 4]
    assert curves["curves"]["duration_s"]["mean"] == [1]
    assert curves["curves"]["captured_bytes"]["mean"] == [100]
    assert curves["broken_steps"] == [(11, "loss nan")]
    again = type(record)(record.time, 0, 1, 1, 15, EventName.LOSSES, {"losses": [4.0, None, 2.0]})
    loss = report_of({"a": lambda: [several, again]}, (), described)["curves"]["loss"]
    assert (loss["steps"], loss["mean"]) == ([10, 12, 13, 15], [5, 4, 4, 2])
