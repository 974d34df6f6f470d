# SPDX-License-Identifier: Apache-2.0
"""`docs/operate/runbook.md` has every line of the log, or that ends a job, and no other ones."""

import ast
import functools
import re
import signal
from pathlib import Path

import pytest

from megatron_moevement.cli import COMMANDS
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.accounting.event import EventName
from megatron_moevement.policy.accounting.event_kinds import EVENT_KINDS
from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.training.arguments import build_parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_moevement"
RUNBOOK = ROOT / "docs" / "operate" / "runbook.md"
SCRIPT = ROOT / "scripts" / "train_moe.sbatch"
EVENTS = RUNBOOK.with_name("events.md")
HOLE = "..."
"""What stands for what differs from line to line."""
LEVELS = {"info", "warning", "error", "exception", "critical"}
NOTICES = {"say", "warn"}
"""Methods of `Notices`."""
ENDS = {
    *("CaptureLostError", "ControlStoreLostError", "DiscardedError", "DivergenceError"),
    *("InVainError", "InitialStateLostError", "LogFullError", "LostAtStartError"),
    *("RejoinBarrierError", "RestartAbort", "RestartsEndedError", "UnfitError", "UnhealthyError"),
    *("UnprovenStateError", "UnverifiedReplayError", "UserError"),
}
"""Exceptions whose message a process prints when it stops, or when a generation ends."""
NO_JOB = (
    *("cli/", "settings/", "policy/facts/", "policy/job/", "policy/window/"),
    *("integrations/megatron/", "training/arguments.py", "training/data/", "training/refusals.py"),
    *("training/reporting/", "training/yaml_arguments.py"),
)
"""Whose refusals are about flags and files alone, in a row of their own."""
A_JOB_ALL_THE_SAME = ("cli/launch.py", "cli/stores.py")


def normal(text):
    """Returns a text with one blank between words."""
    return " ".join(text.split())


def text_of(node):
    """Returns a string that code puts together, with holes; None where a node is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) or HOLE for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text_of(each) or HOLE for each in (node.left, node.right))
    return None


def formatted(text):
    """Returns the text of a logger's format with holes."""
    return normal(re.sub(r"%[-.\d]*[sdfg]", HOLE, text))


@functools.cache
def modules():
    """Returns the modules of the product, with their names in it."""
    return [
        (str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
        if PACKAGE / "testing" not in path.parents
    ]


def message_of(node, function):
    """Returns the text of an argument: of a variable, what the function gave it last."""
    if isinstance(node, ast.Name):
        given = (
            (each.lineno, text_of(each.value) or HOLE)
            for each in ast.walk(function)
            if isinstance(each, ast.Assign)
            and ast.unparse(each.targets[0]) == node.id
            and each.lineno < node.lineno
        )
        return max(given, default=(0, HOLE))[1]
    return text_of(node) or HOLE


def tellers_in(function):
    """Returns the variables of a function that are one of the methods of `Notices`."""
    return {
        ast.unparse(each.targets[0])
        for each in ast.walk(function)
        if isinstance(each, ast.Assign) and is_notice(each.value)
    }


def is_notice(node):
    """Returns whether an expression is a method of `Notices`, or a choice between two."""
    if isinstance(node, ast.IfExp):
        return is_notice(node.body) or is_notice(node.orelse)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in NOTICES
        and "notices" in ast.unparse(node.value)
    )


def lines_in(tree):
    """Yields the formats of what a module logs, and of its notices."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    calls = ((call, each) for each in functions for call in ast.walk(each))
    for call, function in calls:
        if not isinstance(call, ast.Call):
            continue
        if is_notice(call.func) or ast.unparse(call.func) in tellers_in(function):
            yield formatted(message_of(call.args[0], function))
            continue
        if not isinstance(call.func, ast.Attribute):
            continue
        receiver, name = ast.unparse(call.func.value), call.func.attr
        if "logg" in receiver and name in LEVELS:
            message = call.args[0]
        elif name in {"log", "write"} and re.search(
            "INFO|WARNING|ERROR", ast.unparse(call.args[0])
        ):
            message = call.args[1]
        else:
            continue
        yield formatted(message_of(message, function))


def ends_in(tree):
    """Yields the messages of exceptions that a module raises and that end a job or a process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ENDS and node.args:
            yield normal(text_of(node.args[0]) or HOLE)


def script_lines(script):
    """Returns what a shell script gives to its log, and to variables and functions on the way."""
    given = r'(?:log_line (?:"[^"]*"|\S+) (?:"[^"]*"|\S+)|\brequeue|\bline=) ?"((?:[^"\\]|\\.)+)"'
    texts = {
        re.sub(r"\$\(\([^)]*\)\)|\$\{[^}]*\}|\$\w+|\\`[^`]*\\`", HOLE, found[1])
        for found in re.finditer(given, script)
    }
    return {text for text in texts if not is_put_together(text)}


@functools.cache
def printed():
    """Returns all of them, with the modules that have them."""
    found = {}
    for name, tree in modules():
        texts = set(lines_in(tree))
        if name in A_JOB_ALL_THE_SAME or not name.startswith(NO_JOB):
            texts |= set(ends_in(tree))
        for text in texts:
            found.setdefault(text, set()).add(name)
    for text in script_lines(SCRIPT.read_text(encoding="utf-8")):
        found.setdefault(text, set()).add(SCRIPT.name)
    return found


FROM_OTHER_CODE = {
    ("cli/job_end.py", HOLE): [  # the end of a launch
        "the job ended with exit code ...: ...",
        "the job is done in spite of what was lost: ...",
    ],
    ("cli/job_end.py", "process ... ..."): ["process ... was killed by ..."],
    ("integrations/nvrx/rank_assignment.py", HOLE): [
        "--inprocess-granularity node gives up a whole failure domain with a process, and ..."
    ],
    ("integrations/nvrx/restarter.py", "... is lost"): ["the control store at ... is lost"],
    ("integrations/nvrx/restarter.py", "... does not answer: ..."): [
        "the control store at ... does not answer: ..."
    ],
    ("integrations/nvrx/restarter.py", HOLE): ["generation ... of process ... ends: ..."],
    ("integrations/nvrx/sealed_documents.py", "...: ...; it does not count"): [
        "the control store holds under ... what no process of this job wrote"
    ],
    ("runtime/coordination/agreement.py", HOLE * 3): ["--load ... can't be made whole: ..."],
    ("runtime/coordination/meeting.py", HOLE): ["no sign of life within ... s of process ..."],
    ("runtime/tiers/target.py", "... ...: ..."): ["--moevement-tier-dir ...: ..."],
    ("strategies/moevement/opening.py", HOLE): [
        "... replicas need ... failure domains, there are ...: keeping ...",
        "processes have no room for ... copies of each slot within "
        "--moevement-host-memory-limit-gb: keeping ...",
    ],
    ("strategies/moevement/protection/protection_watch.py", HOLE): [
        "any loss has both stages replay: they share the embedding (...)",
        "a loss in the first or the last stage has both replay: they share the embedding (...)",
    ],
    ("strategies/moevement/protection/protection_watch.py", "step ...: ..."): ["protection: ..."],
    ("strategies/moevement/protection/reserve.py", HOLE): ["... is not in reserve: ..."],
    ("strategies/moevement/protection/resident_store.py", HOLE): [],  # a refusal of another rank
    ("strategies/moevement/recovery/planning.py", "...: ..."): [
        f"{verdict.value}: ..." for verdict in Verdict
    ],
    ("strategies/moevement/recovery/rejoin.py", HOLE): ["generation ...: LOCALIZED..."],
    ("strategies/moevement/schedules/window_chooser.py", HOLE): [
        "no W up to ... hides its slots behind an iteration: "
        "the smallest of ... MB is too large, ..."
    ],
    ("strategies/moevement/tiers/resume.py", HOLE): ["goes on from the tier of step ... in ..."],
    ("training/banner.py", HOLE): [
        *("flags, ...: ...", "model: ...", "layout: ...", "memory: ...", "run: ..."),
        *("protected by: ...", "begins: ..."),
    ],
    ("training/ending.py", HOLE): [
        "done: iteration ... of ... is trained",
        "ends after iteration ... of ... by ...; its state is ...; launch it again to go on",
    ],
    ("training/left_runs.py", HOLE): [
        "begins with step ... and leaves alone run ..., which no process uses: ..."
    ],
    ("training/program.py", HOLE): ["process ... stops: ..."],
    ("training/resident.py", HOLE): [],  # why its store was refused
    ("training/starting.py", HOLE): [
        "checkpoint ... is not usable: ...",
        "checkpoint ... was written with other parallel sizes: its random streams are not ...",
        "checkpoint ... is Megatron-LM's: taken are ...; not taken are ...",
    ],
}
"""Lines that a module prints and other code puts together: what the runbook quotes of them."""


def is_put_together(text):
    """Returns whether the words of a line are elsewhere."""
    return re.search(r"[A-Za-z]{3}", text) is None


def quotes(page):
    """Returns what a page quotes: lines, flags and files."""
    found = {span[1].strip() for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", page)}
    return {quote for quote in found if not is_put_together(quote)}


def shows(quote, text):
    """Returns whether a quote is a line, or how one begins."""
    return quote == text or (
        quote.endswith(HOLE) and text.startswith(quote.removesuffix(HOLE).rstrip())
    )


def missing_in(page):
    """Returns the lines that a page lacks."""
    quoted = quotes(page)
    lacking = {
        text
        for text, names in printed().items()
        if not is_put_together(text)
        and not any((name, text) in FROM_OTHER_CODE for name in names)
        and not any(shows(quote, text) for quote in quoted)
    }
    return lacking | {
        quote for known in FROM_OTHER_CODE.values() for quote in known if quote not in quoted
    }


def invented_by(page):
    """Returns the quotes of a page that no code prints."""
    texts = printed()
    elsewhere = {quote for known in FROM_OTHER_CODE.values() for quote in known}
    return {
        quote
        for quote in quotes(page) - elsewhere
        if HOLE in quote and not any(shows(quote, text) for text in texts)
    }


@pytest.fixture(scope="module")
def page():
    return RUNBOOK.read_text(encoding="utf-8")


def test_every_line_of_the_code_is_there(page):
    assert missing_in(page) == set()


def test_every_quote_is_a_line_of_the_code(page):
    assert invented_by(page) == set()


def test_lines_that_are_put_together_elsewhere_are_those_of_the_code():
    found = {
        (name, text)
        for text, names in printed().items()
        for name in names
        if is_put_together(text) or (name, text) in FROM_OTHER_CODE
    }
    assert found == {*FROM_OTHER_CODE}


def parts(quote):
    """Returns the words of a quote; what stands between a verdict and its reason is not theirs."""
    return [part for each in quote.split(HOLE) if (part := each.strip(": "))]


def test_their_words_are_in_the_code():
    strings = {
        normal(node.value)
        for _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for known in FROM_OTHER_CODE.values():
        for part in (part for quote in known for part in parts(quote)):
            assert any(part in text for text in strings), part


def test_every_exit_code_is_there(page):
    section = page.partition("## Exit codes")[2].partition("\n## ")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert {int(code) for code in ExitCode} <= codes
    assert {code - 128 for code in codes if code > 128 and code not in {*ExitCode}} == {
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
    }


def actions_in(events):
    """Returns what a page of events has to do for each, by its name."""
    section = events.partition("## Which there are")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[`(\w+)`\].*\| ([^|]*) \|$", section, re.MULTILINE)
    return {EventName(name): action.strip() for name, action in rows}


def test_every_event_has_an_action_on_the_page_that_the_runbook_names(page):
    assert "(events.md#which-there-are)" in page
    actions = actions_in(EVENTS.read_text(encoding="utf-8"))
    assert actions == {name: kind.action for name, kind in EVENT_KINDS.items()}
    assert all(actions.values())


def test_actions_name_fields_events_commands_and_flags_that_there_are():
    flags = build_parser().flags
    for name, kind in EVENT_KINDS.items():
        known = {*kind.fields, *(each.value for each in EventName)}
        known |= {f"moevement {command}" for command in COMMANDS}
        assert set(re.findall(r"`([^`]+)`", kind.action)) <= known, name
        assert set(re.findall(r"--[a-z-]+", kind.action)) <= flags, name


def test_a_line_that_is_missing_or_invented_is_found(page):
    line = "replication: slot ... of ... is damaged in this memory"
    assert missing_in(page.replace(line, "")) == {line}
    assert invented_by(page + "\n`replication: slot ... is lost`\n") == {
        "replication: slot ... is lost"
    }


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("logger.warning('%s of %d is gone', a, b)", "... of ... is gone"),
        ("logger.exception('gone')", "gone"),
        ("logger.info('%s goes on', a)", "... goes on"),
        ("self._notices.warn(f'{a} is gone')", "... is gone"),
        ("tell = notices.warn if a else notices.say; tell('gone')", "gone"),
        ("logger.log(logging.ERROR, f'{a} is gone')", "... is gone"),
        ("text = 'all ' 'is gone'\n    self._lines.write(logging.WARNING, text)", "all is gone"),
    ],
)
def test_a_line_of_the_log_is_collected(source, line):
    assert list(lines_in(ast.parse(f"def f():\n    {source}\n"))) == [line]
    assert list(lines_in(ast.parse("def f():\n    logger.debug('done')\n"))) == []


def test_a_line_of_a_script_is_collected():
    script = 'log_line "task $1" INFO "$1 of $((n + 1)) is lost" >&2\nrequeue "it ended"\n'
    assert script_lines(script) == {"... of ... is lost", "it ended"}
