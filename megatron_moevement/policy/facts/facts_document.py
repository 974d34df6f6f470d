# SPDX-License-Identifier: Apache-2.0
"""Facts as JSON: written by a job that recovers, read by the command that explains its plan.

A document is `{"generation": 3, "layout": {"pp": 4, ...}, "ends": "independent", "durable": 0,
"processes": [{"process": 0, "domain": "node0", "rank": "pp0.dp0.tp0.cp0.ep0", "committed": 13,
"live": {"condition": "dense", "step": 13, "finished": 14}, "persisted": WINDOW, "holdings":
[{"owner": "pp0.dp0.tp0.cp0.ep0", "window": WINDOW, "slots": [0, 1]}], "logs": [{"direction":
"forward", "steps": [[9, 13]]}], "ledger": [9, 13], "era": 0, "timetable": {"entries": [{"epoch": 0,
"first_step": 2, "window": 3, "digest": "f3", "decision": null}], "first_version": 0}, "holds":
"pp0.ep0", "alike": [9, 13], "is_new": true, "holders": [1]}, ...]}` with WINDOW `{"start": 8,
"size": 3, "epoch": 0}`; `epoch` is the version of a schedule. Steps are given by the first and last
of each run. What a process does not have, a spare its rank for example, is null or left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from megatron_moevement.errors import UserError
from megatron_moevement.policy.facts.document_parts import (
    Fields,
    WrongPartError,
    at,
    built,
    each,
    integer,
    integers,
    one_of,
    part,
    positive,
    seconds,
    text,
    truth,
    wrong,
)
from megatron_moevement.policy.facts.facts import (
    Condition,
    Facts,
    Holding,
    LiveState,
    LogExtent,
    ProcessFacts,
)
from megatron_moevement.policy.job.boundary import Direction
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.policy.number_runs import runs_of
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import (
    Timetable,
    TimetableEntry,
    Trial,
    WindowDecision,
)

T = TypeVar("T")

FACTS = "facts"
"""The kind of these documents, where a job leaves them beside its events."""
MAX_COUNT = 1 << 22
"""More ranks, slots of a window or steps of a log than this are a slip of the pen."""
_KNOWN = 256
"""So many documents of one kind are kept, for the next process that says the same."""


def dump_facts(facts: Facts) -> str:
    """Returns facts as JSON, a line for each process; equal facts give the same text.

    Raises:
        ValueError: a ledger has gaps.
    """
    header = {
        "generation": facts.generation,
        "layout": dataclasses.asdict(facts.layout),
        "ends": facts.ends.value,
        "durable": facts.durable,
    }
    processes = ",\n".join(json.dumps(dump_process(process)) for process in facts.processes)
    return f'{json.dumps(header)[:-1]}, "processes": [\n{processes}\n]}}\n'


def load_facts(text: str, origin: str) -> Facts:
    """Returns the facts of a JSON document.

    Args:
        origin: where it comes from, for error messages.

    Raises:
        UserError: the document is no facts; the message names the field.
    """
    with _read_from(origin):
        return at("facts", _load, json.loads(text))


class ProcessReader:
    """Reads what processes publish; slots that several of them have are there once."""

    def __init__(self) -> None:
        """Knows of no slots yet."""
        self._read = functools.partial(_load_process, _read_once(_load_holding, MAX_COUNT))

    def load(self, documents: Iterable[Any], origin: str) -> tuple[ProcessFacts, ...]:
        """Returns the facts of processes, from what `dump_process` returned of each.

        Args:
            origin: where the documents come from, for error messages.

        Raises:
            UserError: a document is none of that; the message names the field.
        """
        with _read_from(origin):
            return tuple(at("process", self._read, each) for each in documents)


_REMEDY = "give what a job wrote to its --moevement-event-dir, see moevement explain --help"


@contextlib.contextmanager
def _read_from(origin: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise UserError(f"{origin} is no facts: nested too deeply; {_REMEDY}") from error
    except ValueError as error:
        raise UserError(f"{origin} is no facts: {error}; {_REMEDY}") from error


def dump_process(facts: ProcessFacts) -> dict[str, Any]:
    """Returns what one process publishes as JSON has it.

    Raises:
        ValueError: its ledger has gaps.
    """
    if facts.ledger and facts.ledger.step != 1:
        raise ValueError(f"process {facts.process}: a ledger with gaps, {facts.ledger}")
    live = facts.live
    return {
        "process": facts.process,
        "domain": facts.domain,
        "rank": None if facts.rank is None else str(facts.rank),
        "committed": facts.committed,
        "live": {
            "condition": live.condition.value,
            "step": live.step,
            "window": _dump_window(live.window),
            "finished": live.finished,
        },
        "persisted": _dump_window(facts.persisted),
        "holdings": [
            {
                "owner": str(holding.owner),
                "window": _dump_window(holding.window),
                "slots": [j for j in range(holding.window.size) if holding.slots >> j & 1],
            }
            for holding in facts.holdings
        ],
        "logs": [
            {"direction": log.direction.value, "steps": list(runs_of(log.steps))}
            for log in facts.logs
        ],
        "ledger": _dump_run(facts.ledger),
        "era": facts.rollbacks,
        "timetable": None if facts.timetable is None else facts.timetable.document(),
        "holds": facts.replica_id,
        "alike": _dump_run(facts.rng_equal_steps),
        "is_new": facts.is_new,
        "holders": list(facts.holders),
    }


def _dump_window(window: Window | None) -> dict[str, int] | None:
    return None if window is None else window.document


def _dump_run(steps: range) -> list[int] | None:
    return [steps[0], steps[-1]] if steps else None


_FACTS = Fields.of(("generation", "layout", "ends", "processes"), ("durable",))
_LAYOUT = Fields.of((), (size.name for size in dataclasses.fields(Layout)))
_PROCESS = Fields.of(
    ("process", "domain", "live"),
    (
        *("rank", "committed", "persisted", "holdings", "logs", "ledger", "era"),
        *("timetable", "holds", "alike", "is_new", "holders"),
    ),
)
_LIVE = Fields.of(("condition",), ("step", "window", "finished"))
_WINDOW = Fields.of(("start", "size"), ("epoch",))
_TIMETABLE = Fields.of(("entries", "first_version"))
_ENTRY = Fields.of(("epoch", "first_step", "window", "digest"), ("decision",))
_DECISION = Fields.of(("window", "used", "patience", "reached", "trial"))
_TRIAL = Fields.of(("former", "slot_bytes", "iteration_s", "spread_s", "delay_s"))
_HOLDING = Fields.of(("owner", "window", "slots"))
_LOG = Fields.of(("direction", "steps"))


def _load(value: Any) -> Facts:
    parts = _FACTS.read(value)
    process = functools.partial(_load_process, _read_once(_load_holding, MAX_COUNT))
    return built(
        Facts,
        generation=at("generation", integer, parts["generation"]),
        layout=at("layout", _load_layout, parts["layout"]),
        ends=at("ends", functools.partial(one_of, Ends), parts["ends"]),
        durable=part(parts, "durable", integer, 0),
        processes=at("processes", functools.partial(each, process), parts["processes"]),
    )


def _load_layout(value: Any) -> Layout:
    given = _LAYOUT.read(value)
    layout = built(Layout, **{name: part(given, name, positive, 1) for name in given})
    if layout.num_ranks > MAX_COUNT:
        raise WrongPartError(f" has {layout.num_ranks} ranks, more than {MAX_COUNT}")
    return layout


def _load_process(load_holding: Callable[[Any], Holding], value: Any) -> ProcessFacts:
    parts = _PROCESS.read(value)
    return ProcessFacts(
        process=at("process", integer, parts["process"]),
        domain=at("domain", text, parts["domain"]),
        rank=part(parts, "rank", _load_rank, None),
        committed=part(parts, "committed", integer, None),
        live=at("live", _load_live, parts["live"]),
        persisted=part(parts, "persisted", _load_window, None),
        holdings=part(parts, "holdings", functools.partial(each, load_holding), ()),
        logs=part(parts, "logs", _load_logs, ()),
        ledger=part(parts, "ledger", _load_run, range(0)),
        rollbacks=part(parts, "era", integer, 0),
        timetable=part(parts, "timetable", _load_timetable, None),
        replica_id=part(parts, "holds", text, None),
        rng_equal_steps=part(parts, "alike", _load_run, range(0)),
        is_new=part(parts, "is_new", truth, False),
        holders=tuple(part(parts, "holders", integers, [])),
    )


def _read_once(read: Callable[[Any], T], most: int = _KNOWN) -> Callable[[Any], T]:
    """Returns what reads equal documents once: processes have most of theirs in common.

    Args:
        most: so many are known at once.
    """
    known: dict[str, T] = {}

    @functools.wraps(read)
    def read_or_known(value: Any) -> T:
        text = repr(value)
        if text not in known:
            if len(known) >= most:
                known.clear()
            known[text] = read(value)
        return known[text]

    return read_or_known


@_read_once
def _load_live(value: Any) -> LiveState:
    parts = _LIVE.read(value)
    return built(
        LiveState,
        condition=at("condition", functools.partial(one_of, Condition), parts["condition"]),
        step=part(parts, "step", integer, 0),
        window=part(parts, "window", _load_window, None),
        finished=part(parts, "finished", integer, None),
    )


def _load_rank(value: Any) -> LogicalRank:
    return built(LogicalRank.parse, text(value))


@_read_once
def _load_window(value: Any) -> Window:
    parts = _WINDOW.read(value)
    size = at("size", _load_size, parts["size"])
    start = at("start", integer, parts["start"])
    return Window(start, size, part(parts, "epoch", integer, 0))


def _load_size(value: Any) -> int:
    size = positive(value)
    if size > MAX_COUNT:
        raise wrong(value, f"at most {MAX_COUNT}")
    return size


@_read_once
def _load_timetable(value: Any) -> Timetable:
    parts = _TIMETABLE.read(value)
    return built(
        Timetable,
        entries=at("entries", functools.partial(each, _load_entry), parts["entries"]),
        first_version=at("first_version", integer, parts["first_version"]),
    )


def _load_entry(value: Any) -> TimetableEntry:
    parts = _ENTRY.read(value)
    return TimetableEntry(
        at("epoch", integer, parts["epoch"]),
        at("first_step", integer, parts["first_step"]),
        at("window", _load_size, parts["window"]),
        at("digest", text, parts["digest"]),
        part(parts, "decision", _load_decision, None),
    )


def _load_decision(value: Any) -> WindowDecision:
    parts = _DECISION.read(value)
    return WindowDecision(
        window=at("window", _load_size, parts["window"]),
        used=part(parts, "used", _load_size, None),
        patience=at("patience", integer, parts["patience"]),
        reached=at("reached", integer, parts["reached"]),
        trial=part(parts, "trial", _load_trial, None),
    )


def _load_trial(value: Any) -> Trial:
    parts = _TRIAL.read(value)
    return Trial(
        former=at("former", _load_size, parts["former"]),
        slot_bytes=at("slot_bytes", integer, parts["slot_bytes"]),
        iteration_s=at("iteration_s", seconds, parts["iteration_s"]),
        spread_s=at("spread_s", seconds, parts["spread_s"]),
        delay_s=part(parts, "delay_s", seconds, None),
    )


def _load_holding(value: Any) -> Holding:
    parts = _HOLDING.read(value)
    window, slots = _load_slots((parts["window"], parts["slots"]))
    return Holding(at("owner", _load_rank, parts["owner"]), window, slots)


@_read_once
def _load_slots(value: tuple[Any, Any]) -> tuple[Window, int]:
    """Returns a window, and which of its slots are meant, as bits."""
    window = at("window", _load_window, value[0])
    slots = at("slots", functools.partial(each, functools.partial(_load_slot, window)), value[1])
    return window, functools.reduce(operator.or_, (1 << slot for slot in slots), 0)


def _load_slot(window: Window, value: Any) -> int:
    slot = integer(value)
    if slot >= window.size:
        raise wrong(value, f"less than the window's size, {window.size}")
    return slot


@_read_once
def _load_logs(value: Any) -> tuple[LogExtent, ...]:
    return each(_load_log, value)


def _load_log(value: Any) -> LogExtent:
    parts = _LOG.read(value)
    steps = at("steps", _load_steps, parts["steps"])
    direction = at("direction", functools.partial(one_of, Direction), parts["direction"])
    return LogExtent(direction, steps)


def _load_steps(value: Any) -> frozenset[int]:
    runs = each(_load_run, value)
    if sum(map(len, runs)) > MAX_COUNT:
        raise WrongPartError(f" has more than {MAX_COUNT} steps")
    return frozenset().union(*runs)


def _load_run(value: Any) -> range:
    ends = integers(value)
    if len(ends) != 2 or ends[1] < ends[0]:
        raise wrong(value, "[first, last]")
    return range(ends[0], ends[1] + 1)
