# SPDX-License-Identifier: Apache-2.0
"""The pages of flags and events are what the code comes to; events have the fields they name."""

import ast
import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.policy.accounting.event import SHARED, EventName
from megatron_moevement.policy.accounting.event_kinds import COMMON_FIELDS, EVENT_KINDS, Recorder
from megatron_moevement.policy.watching.measurements import Measured
from megatron_moevement.runtime.coordination.progress import Spent
from megatron_moevement.runtime.observation.events import EventRecord

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_moevement"
CLASSES = {"costs.spent": Spent, "noted.measured": Measured}
"""Of what `dataclasses.asdict` adds to an event, by what the code calls it."""
ADDED_LATER = {EventName.ITERATION: {"losses"}}
"""Fields of events that stand for several, put together where they are written."""


@pytest.fixture(scope="module")
def reference():
    """Returns the script that writes the pages, as a module."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_code_comes_to():
    """In a process of its own: other tests register a strategy, which is a choice of a flag."""
    command = [sys.executable, ROOT / "docs" / "reference.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"run docs/reference.py: {result.stdout}{result.stderr}"


def test_a_page_that_was_edited_is_found_and_written_again(
    reference, capsys, tmp_path, monkeypatch
):
    for name in reference.WRITTEN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "docs" / name, tmp_path / name)
    page = tmp_path / "use" / "flags.md"
    page.write_text(page.read_text().replace("`60.0`", "`61.0`"))
    monkeypatch.setattr(reference, "PAGES", tmp_path)
    assert reference.main(["--check"]) == 1
    assert capsys.readouterr().out == "use/flags.md\n"
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0


def test_what_becomes_of_each_flag_of_megatron_lm_is_on_the_page(reference):
    rows = [row.split(" | ") for row in reference.megatron_flags_page().splitlines()]
    flags = {cells[0].strip("|` "): " | ".join(cells[1:]) for cells in reversed(rows)}
    other_page = reference.flags_page()
    theirs = set(reference.MEGATRON_LM.read_text().split())
    elsewhere = {flag for flag in theirs - flags.keys() if f"| `{flag}`" not in other_page}
    assert elsewhere == {"--yaml-cfg"}
    for flag, told in {
        "--lr": "`LR` above 0 |",
        "--optimizer": "`{adam}` | `adam` |",
        "--context-parallel-size": "`1` | refused as *context parallelism*: it is not covered yet",
        "--use-flash-attn": " | has no effect; named once at start",
        "--cp-comm-type": "has no effect, named once at start; refused where *context parallelism*",
        "--encoder-seq-length": " | is taken as `--seq-length`",
        "--use-mcore-models": "`given` | accepted as it is the case",
    }.items():
        assert told in flags[flag], flag


def keys_of(node, function):
    """Returns the names that `**node` adds to a call in a function."""
    if isinstance(node, ast.IfExp):
        return keys_of(node.body, function) | keys_of(node.orelse, function)
    if isinstance(node, ast.Call):
        return {field.name for field in dataclasses.fields(CLASSES[ast.unparse(node.args[0])])}
    if isinstance(node, ast.Name):
        values = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id
        ]
        return set().union(*(keys_of(value, function) for value in values))
    pairs = zip(node.keys, node.values, strict=True)  # of a dictionary
    return set().union(
        *(keys_of(value, function) if key is None else {key.value} for key, value in pairs)
    )


def recorded_by(source):
    """Yields each event that a module records, with the fields that it gives there."""
    functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    calls = [
        (call, function)
        for function in functions
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).rpartition(".")[2] in {"emit", "_tell"}
    ]
    for call, function in calls:
        names = {
            ast.unparse(argument) for argument in call.args if "EventName." in ast.unparse(argument)
        }
        for name in names:
            fields = {one.arg for one in call.keywords if one.arg is not None}
            others = (one.value for one in call.keywords if one.arg is None)
            yield (
                EventName[name.removeprefix("EventName.")],
                fields.union(*(keys_of(each, function) for each in others)),
            )


def test_each_event_has_the_fields_that_the_code_records():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "EventName." in (text := path.read_text(encoding="utf-8")):
            for name, fields in recorded_by(text):
                found[name] = found.get(name, ADDED_LATER.get(name, set())) | fields
    assert found == {name: set(kind.fields) for name, kind in EVENT_KINDS.items()}


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("events.emit(EventName.SPARE, 0)", set()),
        ("self._tell(EventName.SPARE, 0, a=1, b=2)", {"a", "b"}),
        ("x = {'a': 1}\n    y = {**x, 'b': 2}\n    events.emit(EventName.SPARE, **y)", {"a", "b"}),
        ("emit(EventName.SPARE, 0, **({'a': 1} if f else {}))", {"a"}),
    ],
)
def test_fields_of_a_call_are_found(call, fields):
    assert list(recorded_by(f"def f():\n    {call}\n")) == [(EventName.SPARE, fields)]


def test_the_common_fields_are_those_of_a_record():
    names = [field.name for field in dataclasses.fields(EventRecord) if field.name != "fields"]
    assert list(COMMON_FIELDS) == names


def test_events_are_described_in_their_order_and_once():
    assert list(EVENT_KINDS) == list(EventName)


def test_what_all_ranks_share_is_recorded_by_the_first():
    assert {EVENT_KINDS[name].recorder for name in SHARED} == {Recorder.FIRST_RANK}
