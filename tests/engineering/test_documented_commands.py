# SPDX-License-Identifier: Apache-2.0
"""Every command of the pages is run: here, by a test or campaign that is named, or slow.

Of commands in the text, which stand for what a reader fills in, the words are checked.

The slow ones are run as they are written, but for pictures, which do not replace those of docs/;
benchmarks with a limit of time need a machine that does nothing else:
./scripts/test.sh -m slow tests/engineering/test_documented_commands.py [-k PROGRAM]
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moevement.cli import COMMANDS as SUBCOMMANDS
from megatron_moevement.cli import build_parser as build_command
from megatron_moevement.cli import main
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.testing.simulate import main as simulate
from megatron_moevement.training.arguments import build_parser
from tests.harness.command_runs import RUNS, By, Here, Slow
from tests.harness.documented_commands import ROOT, Command, StrayLineError, commands_of, spans_of
from tests.harness.synthetic_run import Shape, SyntheticRun

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SPANS = list(dict.fromkeys(span for page in PAGES for span in spans_of(page)))
"""Commands in the text: they stand for what a reader fills in, so that their words are checked."""

COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))


def way(command):
    """Returns who runs a command; None where nothing does."""
    return next((by for pattern, by in RUNS.items() if re.fullmatch(pattern, command.text)), None)


def ids(command):
    return command.text[:80]


def test_every_command_is_run():
    assert [str(command) for command in COMMANDS if way(command) is None] == []


def test_nothing_is_said_of_commands_that_no_page_has():
    used = {
        next(pattern for pattern in RUNS if re.fullmatch(pattern, command.text))
        for command in COMMANDS
        if way(command) is not None
    }
    assert [pattern for pattern in RUNS if pattern not in used] == []


@pytest.mark.parametrize(
    "by", dict.fromkeys(by for by in RUNS.values() if isinstance(by, By)), ids=str
)
def test_what_runs_a_command_is_there(by):
    text = (ROOT / by.file).read_text(encoding="utf-8")
    assert (f"def {by.name}(" if by.name.startswith("test_") else by.name) in text


OTHERS_FLAGS = r"docker|pip|git|torchrun|curl|pytest|/tmp/fresh"
"""Programs whose flags are not ours."""


def unknown_flags(command):
    """Returns the flags of a command that neither a parser nor its program's text has."""
    if re.match(OTHERS_FLAGS, command.text):
        return set()
    words = re.split(r"[\s=]+", command.text.rpartition("sbatch ")[2])
    files = [
        ROOT / word for word in words if re.match(r"(\./)?(scripts|benchmarks)/\w+\.\w+$", word)
    ]
    texts = [file.read_text(encoding="utf-8") for file in files]
    for module in re.findall(
        r"-m ((?:tests|megatron_moevement)[\w.]+)", " ".join([command.text, *texts])
    ):
        path = ROOT.joinpath(*module.split("."))
        own = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        texts.append(own.read_text(encoding="utf-8"))
    known = {*build_parser().flags, *all_flags(build_command())}
    flags = {word for word in words if re.match(r"--[a-z]", word)} - known
    return {flag for flag in flags if not any(flag in text for text in texts)} - {
        "--nodes",  # of sbatch
        "--ft-rank-heartbeat-timeout",  # of ft_launcher
    }


def all_flags(parser):
    """Yields the flags of a parser and of its sub-commands."""
    yield from parser.flags
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                yield from all_flags(own)


def missing(command):
    """Returns the sub-commands and files of a command that are not there."""
    words = re.sub(r"^([A-Z_]+=\S* )*", "", command.text).split()
    found = set()
    if words[0] == "moevement" and words[1:] and words[1][0] not in "-.":
        found = {words[1].partition("|")[0]} - set(SUBCOMMANDS)
    own = re.compile(r"(\./)?(scripts|benchmarks|tests|docs)/\S+\.\w+")
    files = [word for word in words if own.fullmatch(word)]
    return found | {word for word in files if not (ROOT / word).exists()}


def test_every_flag_is_one_of_its_program():
    found = {str(command): unknown_flags(command) for command in (*COMMANDS, *SPANS)}
    assert {text: flags for text, flags in found.items() if flags} == {}


def test_what_commands_name_is_there():
    found = {str(command): missing(command) for command in (*COMMANDS, *SPANS)}
    assert {text: names for text, names in found.items() if names} == {}
    assert len(SPANS) > 100


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("moevement no-such-command --json", "no-such-command"),
        ("./scripts/test.sh tests/no-such.py", "tests/no-such.py"),
        ("PYTHON=python3.12 ./scripts/no-such.sh -n 2", "./scripts/no-such.sh"),
    ],
)
def test_what_is_gone_is_found(text, name):
    assert missing(Command("page.md", text)) == {name}


@pytest.mark.parametrize(
    "text",
    [
        "moevement status --no-such-flag",
        "./scripts/run_local.sh -n 4 -- --no-such-flag",
        ".venv/bin/python benchmarks/report.py --no-such-flag 3",
        "./scripts/explore.sh --seeds 3 --no-such-flag",
    ],
)
def test_a_flag_that_is_gone_is_found(text):
    assert unknown_flags(Command("page.md", text)) == {"--no-such-flag"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns a folder in which commands are run, with the events of a run."""
    shape = Shape(layout=Layout(pp=2), spares=1, steps=12, faults=1)
    SyntheticRun(shape).write(tmp_path / "events")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CONFIG_HOME"):  # what configures a user's programs stays as it is
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def words_of(command):
    """Returns the words of a command, with something for what a reader puts in."""
    text = command.text.replace("$stdlib", os.path.dirname(json.__file__))
    places = {"EVENT_DIR": "events", "EMPTY": "empty", "FOLDER": "wheels"}
    words = [*shlex.split(text), *way(command).added]
    return [places.get(word, word) for word in words if not word.startswith(">")]


def code_of(command):
    """Runs a command, and returns its exit code."""
    words = words_of(command)
    if words[0] == "moevement":
        return main(words[1:])
    if "megatron_moevement.testing.simulate" in words:
        return simulate(words[3:])
    module = {"fork": "megatron_moevement.integrations.megatron.fork", "pip": "pip"}[words[0]]
    return subprocess.run([sys.executable, "-m", module, *words[1:]], check=False).returncode


BY_PAGE = {
    page: [
        command for command in COMMANDS if command.page == page and isinstance(way(command), Here)
    ]
    for page in dict.fromkeys(command.page for command in COMMANDS)
}


@pytest.mark.parametrize("page", [page for page, own in BY_PAGE.items() if own])
def test_the_commands_of_a_page_end_as_they_should(page, folder):
    codes = {command.text: code_of(command) for command in BY_PAGE[page]}
    assert codes == {command.text: way(command).code for command in BY_PAGE[page]}


@pytest.fixture
def shared_folder():
    """Removes the folder of stores after the test, unless it was there before."""
    folder = Path(f"/dev/shm/moevement-{os.getuid()}")
    was_there = folder.exists()
    yield
    if not was_there:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(0)  # each has its own
@pytest.mark.usefixtures("shared_folder")
@pytest.mark.parametrize(
    "command", {one.text: one for one in COMMANDS if isinstance(way(one), Slow)}.values(), ids=ids
)
def test_a_slow_command_ends_well(command, tmp_path):
    text = re.sub(r"(--pictures?) docs/", rf"\1 {tmp_path}/", command.text)
    environment = {**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    (tmp_path / "evidence").mkdir()
    limit_s = way(command).limit.total_seconds()
    subprocess.run(["bash", "-c", text], cwd=ROOT, env=environment, check=True, timeout=limit_s)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "    moevement status   # now\n    moevement watch \\\n        DIR",
            ["moevement status", "moevement watch DIR"],
        ),
        ("```\nSPARES=1 sbatch a.sbatch\n```", ["SPARES=1 sbatch a.sbatch"]),
        ("    $ moevement status\n    nothing runs", ["moevement status"]),
        ("    generation 1: LOCALIZED\n", []),
        ("Text\n    that goes on\n", []),
    ],
)
def test_commands_are_found(text, found, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [command.text for command in commands_of(page)] == found


@pytest.mark.parametrize("text", ["    moevement status\n    nothing runs", "    cat file\n"])
def test_a_line_that_may_be_a_command_is_no_output(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(StrayLineError):
        commands_of(page)


def test_a_command_that_nothing_runs_is_found():
    assert way(Command("page.md", "moevement no-such-command")) is None


def test_commands_in_the_text_are_found_over_the_ends_of_lines(tmp_path):
    page = tmp_path / "page.md"
    text = (
        "Use `moevement clean\n--all`, not `moevement` or `--all`.\n\n    moevement status `a b`\n"
    )
    page.write_text(text)
    assert [span.text for span in spans_of(page)] == ["moevement clean --all"]
