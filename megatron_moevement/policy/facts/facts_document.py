"""Facts as JSON: written by a job that recovers, read by the command that explains its plan.

A document is `{"generation": 3, "layout": {"pp": 4, ...}, "ends": "independent", "durable": 0,
"processes": [{"process": 0, "domain": "node0", "rank": "pp0.dp0.tp0.cp0.ep0", "committed": 13,
"live": {"condition": "dense", "step": 13, "finished": 14}, "persisted": WINDOW, "holdings":
[{"owner": "pp0.dp0.tp0.cp0.ep0", "window": WINDOW, "slots": [0, 1]}], "logs": [{"direction":
"forward", "steps": [[9, 13]]}], "ledger": [9, 13], "era": 0, "epoch": 0, "holds": "pp0.ep0",
"alike": [9, 13], "is_new": true, "holders": [1]}, ...]}` with WINDOW `{"start": 8, "size": 3,
"epoch": 0}`. Steps are given by the first and last of each run. What a process does not have, a
spare its rank for example, is null or left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from megatron_moevement.errors import UserError
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
from megatron_moevement.policy.window.schedule import Window

_Parts = dict[str, "_Field"]
T = TypeVar("T")
E = TypeVar("E", bound=Enum)

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
        return _load(_Field(json.loads(text), "facts"))


def load_processes(documents: Iterable[Any], origin: str) -> tuple[ProcessFacts, ...]:
    """Returns what processes publish, from what `dump_process` returned of each.

    Raises:
        UserError: a document is none of that; the message names the field.
    """
    with _read_from(origin):
        return tuple(_load_process(_Field(each, "process")) for each in documents)


@contextlib.contextmanager
def _read_from(origin: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise UserError(f"{origin} is no facts: nested too deeply; see --help") from error
    except ValueError as error:
        raise UserError(f"{origin} is no facts: {error}; see --help") from error


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
            {"direction": log.direction.value, "steps": list(_runs(log.steps))}
            for log in facts.logs
        ],
        "ledger": _dump_run(facts.ledger),
        "era": facts.rollbacks,
        "epoch": facts.schedule_version,
        "holds": facts.replica_id,
        "alike": _dump_run(facts.rng_equal_steps),
        "is_new": facts.is_new,
        "holders": list(facts.holders),
    }


def _dump_window(window: Window | None) -> dict[str, int] | None:
    return None if window is None else window.document


def _dump_run(steps: range) -> list[int] | None:
    return [steps[0], steps[-1]] if steps else None


def _runs(steps: Iterable[int]) -> Iterator[list[int]]:
    """Yields the first and last step of each run of consecutive steps, ascending."""
    run: list[int] = []
    for step in sorted(steps):
        if run and step == run[1] + 1:
            run[1] = step
            continue
        if run:
            yield run
        run = [step, step]
    if run:
        yield run


class _Field(NamedTuple):
    """A part of a document, and where it lies; a job reads a hundred of each of its processes."""

    value: Any
    name: str | int
    whole: _Field | None = None

    @property
    def path(self) -> str:
        """The way to it, for error messages."""
        if self.whole is None:
            return str(self.name)
        inner = f"[{self.name}]" if isinstance(self.name, int) else f".{self.name}"
        return f"{self.whole.path}{inner}"

    def wrong(self, wanted: str) -> ValueError:
        found = json.dumps(self.value)
        found = found if len(found) <= 40 else found[:37] + "..."
        return ValueError(f"{self.path} is {found}, must be {wanted}")

    def fields(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> _Parts:
        """Returns the parts of an object; those that are left out are null."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for name in required:
            if name not in self.value:
                raise ValueError(f"{self.path} has no {name!r}")
        known = (*required, *optional)
        for name in self.value:
            if name not in known:
                raise ValueError(f"{self.path} has a strange field {name!r}")
        get = self.value.get
        return {name: _Field(get(name), name, self) for name in known}

    def items(self) -> tuple[_Field, ...]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return tuple(_Field(item, place, self) for place, item in enumerate(self.value))

    def integer(self, least: int = 0) -> int:
        if type(self.value) is not int or self.value < least:
            raise self.wrong(f"a whole number of at least {least}")
        return self.value

    def integers(self) -> list[int]:
        """Returns whole numbers of at least 0."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        for place, item in enumerate(self.value):
            if type(item) is not int or item < 0:
                _Field(item, place, self).integer()
        return self.value

    def truth(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def one_of(self, kind: type[E]) -> E:
        for member in kind:
            if member.value == self.value:
                return member
        raise self.wrong("one of " + ", ".join(json.dumps(member.value) for member in kind))

    def built(self, build: Callable[..., T], **arguments: Any) -> T:
        """Returns what `build` makes; what it refuses is told with the path."""
        try:
            return build(**arguments)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def or_else(self, absent: T, read: Callable[[_Field], T]) -> T:
        """Returns what `read` makes of this part, `absent` where it is null."""
        return absent if self.value is None else read(self)


def _load(field: _Field) -> Facts:
    parts = field.fields(("generation", "layout", "ends", "processes"), ("durable",))
    generation = parts["generation"].integer()
    return field.built(
        Facts,
        generation=generation,
        layout=_load_layout(parts["layout"]),
        ends=parts["ends"].one_of(Ends),
        durable=parts["durable"].or_else(0, _Field.integer),
        processes=tuple(map(_load_process, parts["processes"].items())),
    )


def _load_layout(field: _Field) -> Layout:
    sizes = field.fields((), tuple(size.name for size in dataclasses.fields(Layout)))
    given = {name: size.or_else(1, lambda size: size.integer(1)) for name, size in sizes.items()}
    layout = field.built(Layout, **given)
    if layout.num_ranks > MAX_COUNT:
        raise ValueError(f"{field.path} has {layout.num_ranks} ranks, more than {MAX_COUNT}")
    return layout


def _load_process(field: _Field) -> ProcessFacts:
    parts = field.fields(
        ("process", "domain", "live"),
        (
            *("rank", "committed", "persisted", "holdings", "logs", "ledger", "era", "epoch"),
            *("holds", "alike", "is_new", "holders"),
        ),
    )
    return ProcessFacts(
        process=parts["process"].integer(),
        domain=parts["domain"].text(),
        rank=parts["rank"].or_else(None, _load_rank),
        committed=parts["committed"].or_else(None, _Field.integer),
        live=_load_live(parts["live"]),
        persisted=parts["persisted"].or_else(None, _load_window),
        holdings=parts["holdings"].or_else((), lambda part: _each(part, _load_holding)),
        logs=parts["logs"].or_else((), lambda part: _each(part, _load_log)),
        ledger=parts["ledger"].or_else(range(0), _load_run),
        rollbacks=parts["era"].or_else(0, _Field.integer),
        schedule_version=parts["epoch"].or_else(0, _Field.integer),
        replica_id=parts["holds"].or_else(None, _Field.text),
        rng_equal_steps=parts["alike"].or_else(range(0), _load_run),
        is_new=parts["is_new"].or_else(False, _Field.truth),
        holders=parts["holders"].or_else((), lambda part: tuple(part.integers())),
    )


def _each(field: _Field, read: Callable[[_Field], T]) -> tuple[T, ...]:
    return tuple(map(read, field.items()))


def _read_once(read: Callable[[_Field], T]) -> Callable[[_Field], T]:
    """Returns what reads equal documents once: processes have most of theirs in common."""
    known: dict[str, T] = {}

    @functools.wraps(read)
    def read_or_known(field: _Field) -> T:
        text = repr(field.value)
        if text not in known:
            if len(known) >= _KNOWN:
                known.clear()
            known[text] = read(field)
        return known[text]

    return read_or_known


@_read_once
def _load_live(field: _Field) -> LiveState:
    parts = field.fields(("condition",), ("step", "window", "finished"))
    return field.built(
        LiveState,
        condition=parts["condition"].one_of(Condition),
        step=parts["step"].or_else(0, _Field.integer),
        window=parts["window"].or_else(None, _load_window),
        finished=parts["finished"].or_else(None, _Field.integer),
    )


def _load_rank(field: _Field) -> LogicalRank:
    return field.built(LogicalRank.parse, name=field.text())


@_read_once
def _load_window(field: _Field) -> Window:
    parts = field.fields(("start", "size"), ("epoch",))
    size = parts["size"].integer(1)
    if size > MAX_COUNT:
        raise parts["size"].wrong(f"at most {MAX_COUNT}")
    return Window(parts["start"].integer(), size, parts["epoch"].or_else(0, _Field.integer))


def _load_holding(field: _Field) -> Holding:
    parts = field.fields(("owner", "window", "slots"))
    window = _load_window(parts["window"])
    slots = 0
    for place, slot in enumerate(parts["slots"].integers()):
        if slot >= window.size:
            raise parts["slots"].items()[place].wrong(f"less than the window's size, {window.size}")
        slots |= 1 << slot
    return Holding(_load_rank(parts["owner"]), window, slots)


@_read_once
def _load_log(field: _Field) -> LogExtent:
    parts = field.fields(("direction", "steps"))
    runs = _each(parts["steps"], _load_run)
    if sum(map(len, runs)) > MAX_COUNT:
        raise ValueError(f"{parts['steps'].path} has more than {MAX_COUNT} steps")
    return LogExtent(parts["direction"].one_of(Direction), frozenset().union(*runs))


def _load_run(field: _Field) -> range:
    ends = field.integers()
    if len(ends) != 2 or ends[1] < ends[0]:
        raise field.wrong("[first, last]")
    return range(ends[0], ends[1] + 1)
