# SPDX-License-Identifier: Apache-2.0
"""Facts as JSON: what is written is read back the same, what is wrong is told with its place."""

import copy
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moevement.errors import UserError
from megatron_moevement.policy.facts.facts import (
    Condition,
    Facts,
    Holding,
    LiveState,
    LogExtent,
    ProcessFacts,
)
from megatron_moevement.policy.facts.facts_document import dump_facts, load_facts
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import (
    Timetable,
    TimetableEntry,
    Trial,
    WindowDecision,
)
from tests.harness.job_facts import Job
from tests.harness.one_schedule import one_schedule

STEPS = st.integers(0, 40)
SIZES = st.integers(1, 3)
RANKS = st.builds(LogicalRank, *[st.integers(0, 12)] * 5)
WINDOWS = st.builds(Window, STEPS, st.integers(1, 5), st.integers(0, 2))
COUNTS = STEPS.map(lambda k: k + 1)
TIMES = st.floats(0, 1e6)
TRIALS = st.builds(Trial, COUNTS, STEPS, TIMES, TIMES, st.none() | TIMES)
DECISIONS = st.builds(WindowDecision, COUNTS, st.none() | COUNTS, STEPS, STEPS, st.none() | TRIALS)


@st.composite
def live_states(draw):
    condition = draw(st.sampled_from(Condition))
    finished = draw(st.none() | STEPS)
    if condition is not Condition.PARTIAL:
        return LiveState(condition, draw(STEPS), finished=finished)
    window = draw(WINDOWS)
    return LiveState(condition, draw(st.integers(window.start, window.last)), window, finished)


@st.composite
def holdings(draw):
    window = draw(WINDOWS)
    return Holding(draw(RANKS), window, draw(st.integers(0, (1 << window.size) - 1)))


LOGS = st.builds(LogExtent, st.sampled_from(Direction), st.frozensets(STEPS))


DOCUMENT = json.loads(dump_facts(Job(Layout(pp=2), step=5, spares=1).facts()))


@st.composite
def any_facts(draw):
    """Draws facts of any kind, protocol or not: the document does not judge them."""
    layout = draw(st.builds(Layout, *[SIZES] * 6))
    ranks = draw(st.lists(st.none() | st.sampled_from(layout.ranks), max_size=6))
    ranks = [rank for i, rank in enumerate(ranks) if rank is None or rank not in ranks[:i]]
    processes = tuple(
        ProcessFacts(
            process=number,
            domain=draw(st.text(max_size=4)),
            rank=rank,
            committed=draw(st.none() | STEPS),
            live=draw(live_states()),
            persisted=draw(st.none() | WINDOWS),
            holdings=tuple(draw(st.lists(holdings(), max_size=3))),
            logs=tuple(draw(st.lists(LOGS, max_size=2))),
            ledger=range(*sorted(draw(st.tuples(STEPS, STEPS)))),
            rollbacks=draw(st.integers(0, 2)),
            is_new=draw(st.booleans()),
            holders=tuple(draw(st.lists(STEPS, max_size=3))),
            timetable=draw(
                st.none() | st.builds(one_schedule, COUNTS, STEPS, STEPS, st.none() | DECISIONS)
            ),
            replica_id=draw(st.none() | st.text(max_size=4)),
            rng_equal_steps=range(*sorted(draw(st.tuples(STEPS, STEPS)))),
        )
        for number, rank in enumerate(ranks)
    )
    return Facts(draw(STEPS), layout, draw(st.sampled_from(Ends)), draw(STEPS), processes)


IN_CODE = {
    "era": "rollbacks",
    "holds": "replica_id",
    "alike": "rng_equal_steps",
    "epoch": "schedule_version",
}
"""Keys of documents that have other names in the code."""


@given(any_facts())
def test_what_is_written_is_read_back(facts):
    text = dump_facts(facts)
    assert load_facts(text, "a.json") == facts
    assert dump_facts(load_facts(text, "a.json")) == text


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (DOCUMENT, Facts),
        (DOCUMENT["layout"], Layout),
        (DOCUMENT["processes"][0], ProcessFacts),
        (DOCUMENT["processes"][0]["live"], LiveState),
        (DOCUMENT["processes"][0]["timetable"], Timetable),
        (DOCUMENT["processes"][0]["timetable"]["entries"][0], TimetableEntry),
        (DOCUMENT["processes"][0]["persisted"], Window),
        (DOCUMENT["processes"][0]["holdings"][0], Holding),
        (DOCUMENT["processes"][0]["logs"][0], LogExtent),
    ],
)
def test_no_field_is_left_out(part, kind):
    named = getattr(kind, "_fields", None) or [one.name for one in dataclasses.fields(kind)]
    assert {IN_CODE.get(key, key) for key in part} == set(named)


@settings(max_examples=50)
@given(st.recursive(st.none() | st.integers() | st.text(), st.lists), st.data())
def test_whatever_stands_in_a_field_is_read_or_refused_in_one_line(junk, data):
    document = json.loads(dump_facts(data.draw(any_facts())))
    place = document
    while isinstance(place, dict | list) and place and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else [0]))
        if not isinstance(place[key], dict | list):
            break
        place = place[key]
    if isinstance(place, dict) and place:
        place[data.draw(st.sampled_from(sorted(place)))] = junk
    outcome = outcome_of(json.dumps(document))
    if isinstance(outcome, Facts):
        assert load_facts(dump_facts(outcome), "a.json") == outcome
    else:
        assert outcome.startswith("a.json is no facts: facts")
        assert "\n" not in outcome


def outcome_of(text):
    """Returns the facts of a document, or what is said of it."""
    try:
        return load_facts(text, "a.json")
    except UserError as error:
        return str(error)


ENTRY = ("processes", 0, "timetable", "entries", 0)


def decision(**wrong):
    return {"window": 3, "used": None, "patience": 3, "reached": 4, "trial": None} | wrong


def trial(**wrong):
    times = {"iteration_s": 1.5, "spread_s": 0, "delay_s": None}
    return {"former": 4, "slot_bytes": 9, **times, **wrong}


def assert_refused(document, *parts):
    with pytest.raises(UserError) as raised:
        load_facts(json.dumps(document), "a.json")
    message = str(raised.value)
    assert message.startswith("a.json is no facts: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("generation",), "3", ("facts.generation", '"3"', "whole number")),
        (("generation",), True, ("facts.generation",)),
        (("generation",), -1, ("facts.generation", "-1")),
        (("ends",), "bound", ("facts.ends", '"independent"', '"tied"')),
        (("durable",), [], ("facts.durable",)),
        (("layout", "pp"), 0, ("facts.layout.pp", "at least 1")),
        (("layout", "pp"), 1 << 40, ("facts.layout", "ranks")),
        (("layout", "vp"), 2, ("facts.layout", "'vp'")),
        (("processes",), {}, ("facts.processes", "a list")),
        (("processes", 0, "domain"), 5, ("facts.processes[0].domain", "a text")),
        (("processes", 1, "process"), 0, ("two processes have one number",)),
        (("processes", 1, "rank"), "pp0.dp0.tp0.cp0.ep0", ("two processes occupy one",)),
        (("processes", 1, "rank"), "pp7.dp0.tp0.cp0.ep0", ("is no rank of",)),
        (("processes", 1, "rank"), "rank 1", ("facts.processes[1].rank", "'rank 1'")),
        (("processes", 1, "committed"), 5.0, ("facts.processes[1].committed", "5.0")),
        (("processes", 0, "live", "condition"), "warm", ("live.condition", '"dense"')),
        (("processes", 0, "live", "window"), {"start": 3, "size": 3}, ("processes[0].live",)),
        (("processes", 0, "persisted", "size"), 0, ("persisted.size",)),
        (("processes", 0, "persisted", "size"), 1 << 40, ("persisted.size",)),
        (("processes", 0, "holdings", 0, "slots"), [0, 3], ("holdings[0].slots[1]", "is 3")),
        (("processes", 0, "holdings", 0, "owner"), None, ("holdings[0].owner", "a text")),
        (("processes", 0, "logs", 0, "direction"), "up", ("logs[0].direction", '"backward"')),
        (("processes", 0, "logs", 0, "steps"), [[3, 1 << 40]], ("logs[0].steps", "steps")),
        (("processes", 0, "logs", 0, "steps"), [[4, 3]], ("logs[0].steps[0]", "[first, last]")),
        (("processes", 0, "ledger"), [4], ("processes[0].ledger", "[first, last]")),
        ((*ENTRY, "decision"), {"window": 3}, ("entries[0].decision", "'used'")),
        ((*ENTRY, "decision"), decision(used=0), ("decision.used", "at least 1")),
        ((*ENTRY, "decision"), decision(trial=9), ("decision.trial", "an object")),
        ((*ENTRY, "decision"), decision(trial=trial(spread_s=-1)), ("trial.spread_s", "-1")),
    ],
)
def test_a_wrong_field_is_named_with_what_it_has_and_what_it_must_be(path, value, parts):
    document = copy.deepcopy(DOCUMENT)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert_refused(document, *parts)


@pytest.mark.parametrize("field", ["generation", "layout", "ends", "processes"])
def test_a_missing_field_is_named(field):
    document = {name: value for name, value in DOCUMENT.items() if name != field}
    assert_refused(document, f"facts has no '{field}'")


@pytest.mark.parametrize("document", [[], None, 3, "facts", {}])
def test_what_is_no_object_with_fields_is_refused(document):
    assert_refused(document, "facts")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nan"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(UserError, match=r"^a\.json is no facts: "):
        load_facts(text, "a.json")


def test_a_ledger_with_gaps_is_not_written_as_if_it_had_none():
    facts = Job(Layout(), step=5, spares=0).facts()
    (process,) = facts.processes
    odd = ProcessFacts(
        process.process, process.domain, process.rank, 5, process.live, ledger=range(1, 6, 2)
    )
    with pytest.raises(ValueError, match="gaps"):
        dump_facts(Facts(1, facts.layout, facts.ends, None, (odd,)))
