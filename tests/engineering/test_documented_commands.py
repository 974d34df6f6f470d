# SPDX-License-Identifier: Apache-2.0
"""Every command of README.md and docs/ is run: here, by a test or campaign that is named, or slow.

The slow ones are run as they are written, but for pictures, which do not replace those of docs/;
benchmarks with a limit of time need a machine that does nothing else:
./scripts/test.sh -m slow tests/engineering/test_documented_commands.py [-k PROGRAM]
"""

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_moevement.cli import build_parser as build_command
from megatron_moevement.cli import main
from megatron_moevement.policy.job.ranks import Layout
from megatron_moevement.testing.simulate import main as simulate
from megatron_moevement.training.arguments import build_parser
from tests.harness.documented_commands import ROOT, Command, StrayLineError, commands_of
from tests.harness.synthetic_run import Shape, SyntheticRun

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))


@dataclasses.dataclass(frozen=True)
class Here:
    """Run by this file.

    Attributes:
        added: what the command is given besides, for it to end at once and to touch nothing.
        code: the exit code with which it ends.
    """

    added: tuple[str, ...] = ()
    code: int = 0


@dataclasses.dataclass(frozen=True)
class By:
    """Run by something else.

    Attributes:
        file: that has it.
        name: of a test, or the words with which a script runs it.
    """

    file: str
    name: str


@dataclasses.dataclass(frozen=True)
class Slow:
    """Run by this file where slow tests are asked for."""

    limit: timedelta = timedelta(minutes=30)


HERE, SLOW = Here(), Slow()
HOURS = Slow(timedelta(hours=3))
RANKS = By("tests/launch/test_launch.py", "test_two_pipeline_stages_train_and_one_rank_prints")
CHECKED = By("tests/cli/test_check.py", "test_a_job_that_works_is_shown_on_one_screen")
SBATCH = By("tests/launch/test_sbatch.py", "test_each_task_takes_its_rank_from_slurm")
IMAGE = By("scripts/lint.sh", "check_if_installed hadolint Dockerfile")
RUNS = {
    r"\./scripts/demo\.sh": By("tests/launch/test_demo.py", "test_a_killed_rank_costs_no_bit"),
    r"\./scripts/demo_recovery\.sh": SLOW,
    r"\./scripts/(setup|test)\.sh": By(".ci/run", "./scripts/test.sh"),  # which sets up
    r"\./scripts/mutations\.sh": SLOW,
    r"\./scripts/test\.sh -m 'slow or not slow' tests/launch/test_slurm\.py": By(
        "tests/launch/test_slurm.py", "test_what_a_job_loses_changes_no_bit"
    ),
    r"TIER_KILLS=200 \./scripts/tier_campaign\.sh .*": SLOW,
    r"\./scripts/explore\.sh --report": By(
        "tests/testing/test_explorer_pieces.py",
        "test_the_report_names_totals_histograms_and_failures",
    ),
    r"\./scripts/explore\.sh --story .*": By(
        "tests/testing/test_explorer_seeds.py", "test_everything_is_as_promised"
    ),
    r"\./scripts/explore\.sh --seeds .*": HOURS,
    r"\./scripts/gpu_check\.sh.*": By(
        "tests/testing/test_gpu_check.py",
        "test_the_command_runs_small_on_a_cpu_and_goes_on_where_it_was",
    ),
    r"\./scripts/run_local\.sh .* --moevement-faults .*": By(
        "tests/training/test_fault_injection.py",
        "test_an_exception_in_the_backward_pass_fails_the_job",
    ),
    r"\./scripts/run_local\.sh .* --moevement-mtbf .*": By(
        "tests/training/test_fault_injection.py",
        "test_drawn_faults_strike_who_and_when_the_seed_says_over_several_launches",
    ),
    r"\./scripts/run_local\.sh .* --moevement-fault-trace .*": By(
        "tests/training/test_fault_injection.py", "test_a_trace_strikes_at_its_time"
    ),
    r"\./scripts/run_local\.sh .* --metrics-address .*": By(
        "tests/launch/test_launch.py", "test_the_launcher_serves_metrics_until_the_job_ends"
    ),
    r"\./scripts/run_local\.sh .* -- check .*": By(
        "tests/cli/test_check_links.py", "test_all_pairs_that_copies_go_between_are_measured"
    ),
    r"\./scripts/run_local\.sh .* --inprocess-restart": By(
        "tests/strategies/test_restart.py",
        "test_spares_take_the_places_of_killed_processes_and_no_bit_changes",
    ),
    r"\./scripts/run_local\.sh -n 4 -- --model-preset tiny .*": RANKS,
    r"\./scripts/run_ft_launcher\.sh .*": By(
        "tests/strategies/test_ft_launcher.py",
        "test_a_killed_rank_is_restarted_and_the_job_goes_on_from_memory",
    ),
    r"(SPARES=\d |DATA_PATH=\S+ TOKENIZER_MODEL=\S+ )sbatch .*": SBATCH,
    r"CHECK=1 .*sbatch .*": By(
        "tests/launch/test_sbatch.py",
        "test_a_job_that_is_only_checked_is_looked_at_by_all_its_tasks",
    ),
    r"torchrun .* -m megatron_moevement\.cli check .*": By(
        "tests/cli/test_check_links.py", "test_a_launch_says_how_large_the_job_is"
    ),
    r"torchrun .*pretrain_moe\.py .*": By(
        "tests/launch/test_torchrun.py", "test_torchrun_trains_two_stages_with_protection"
    ),
    r"moevement (account|recoveries|status|report) EVENT_DIR": HERE,
    r"\.venv/bin/moevement recoveries runs/demo/\*/killed/events": By(
        "scripts/demo.sh", '"$moevement" recoveries "$run/killed/events"'
    ),
    r"git clone .* && cd .*": By(
        "tests/launch/test_setup.py", "test_a_second_run_says_and_does_nothing"
    ),
    r"moevement watch EVENT_DIR": Here(("--once",)),
    r"moevement status": Here(("--store-dir", "EMPTY"), code=2),  # which has nothing to say
    r"moevement inspect": Here(("--store-dir", "EMPTY")),
    r"kubectl apply -f kubernetes\.yaml": By(
        "tests/launch/test_kubernetes.py",
        "test_a_process_of_a_pod_is_killed_and_the_others_go_on",
    ),
    r"moevement scripts .*": HERE,
    r"moevement schedule .*": HERE,
    r"moevement data .*": HERE,
    r"stdlib=.*": By(
        "scripts/demo.sh", """'import sysconfig; print(sysconfig.get_path("stdlib"))'"""
    ),
    r"moevement ended .*": By(
        "tests/launch/test_sbatch.py", "test_the_end_of_a_killed_process_is_among_its_events"
    ),
    r"moevement check --paper": By(
        "tests/cli/test_check.py", "test_the_jobs_of_the_paper_are_shown_beside_its_figures"
    ),
    r"moevement check .*": CHECKED,
    r"moevement operators .*": By(
        "tests/strategies/test_operator_table.py",
        "test_the_ranks_of_a_job_are_started_and_one_of_them_is_chosen",
    ),
    r"moevement convert .*": By(
        "tests/strategies/test_convert.py", "test_the_command_starts_the_ranks_of_the_job"
    ),
    r"curl http://.*/metrics": By(
        "tests/cli/test_metrics.py", "test_each_metric_is_served_with_its_kind_and_its_meaning"
    ),
    r"fork check": HERE,
    r"(fork|python -m megatron_moevement\.integrations\.megatron\.fork) install": By(
        "tests/fork/test_wheel.py", "test_pip_installs_it_as_a_version_that_the_package_accepts"
    ),
    r"fork build .*": By(
        "tests/fork/test_wheel.py", "test_a_build_leaves_the_wheel_alone_in_its_directory"
    ),
    r"fork (edit|export) .*|cd \.\./megatron-fork && .*": By(
        "tests/fork/test_checkout.py", "test_a_commit_becomes_a_patch"
    ),
    r"git (checkout core|am ).*": By(
        "tests/fork/test_marker.py", "test_an_own_checkout_patched_by_git_am_counts"
    ),
    r"pip config set .*": HERE,
    r"pip install \.": By(
        "tests/engineering/test_packaging.py",
        "test_pip_installs_it_and_it_runs_without_the_repository",
    ),
    r"python -m venv /tmp/fresh|/tmp/fresh/bin/pip .*": By(
        "scripts/setup.sh", '"$1" -m venv "$VENV"'
    ),
    r"docker .*": IMAGE,
    r"\.venv/bin/python benchmarks/training_loop\.py": By(
        "tests/benchmarks/test_training_loop.py",
        "test_our_loop_has_the_losses_of_megatron_core_used_directly",
    ),
    r"\.venv/bin/python benchmarks/.*": HOURS,
    r"pytest .* tests/strategies/test_bystanders\.py": SLOW,
    r"\.venv/bin/python -m megatron_moevement\.testing\.simulate --seeds 10000": SLOW,
    r"\.venv/bin/python -m megatron_moevement\.testing\.simulate .* --mutate .*": Here(code=1),
}
"""What runs a command, by how it looks; the first pattern that fits counts."""


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


def test_every_flag_is_one_of_its_program():
    found = {str(command): unknown_flags(command) for command in COMMANDS}
    assert {text: flags for text, flags in found.items() if flags} == {}


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
