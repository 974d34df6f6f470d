# SPDX-License-Identifier: Apache-2.0
"""Shrinking, results, stories and the report of the explorer."""

import dataclasses
import io
import os

import pytest
from rich.console import Console

from megatron_moevement.errors import UserError
from megatron_moevement.training.arguments import parse
from tests.harness.explorer.mend import Mend
from tests.harness.explorer.oracle import Complaint
from tests.harness.explorer.report import longest_row, print_report
from tests.harness.explorer.results import Result, Results
from tests.harness.explorer.scenario import draw_scenario
from tests.harness.explorer.shrinking import shrink, simplifications
from tests.harness.explorer.story import keep_story, read_story
from tests.harness.random_text import prepare_random_text

SEEDS = range(8)
RESULT = Result(
    seed=7,
    sources="abc",
    complaints=(),
    seconds=12.5,
    layout="pp2",
    shape=("bf16", "tied"),
    window=4,
    replicas=1,
    strikes=2,
    kinds=("kill", "outside"),
    places=("barrier",),
    verdicts=("LOCALIZED", "GLOBAL"),
    replayed=(4, 3),
    lost=(),
    launches=1,
)
WRONG = dataclasses.replace(RESULT, seed=8, complaints=("bits: no end",), story="build/x")


def test_shrinking_ends_with_the_one_strike_and_the_plain_job_that_matter():
    scenario = next(each for each in map(draw_scenario, range(500)) if each.history.strikes == 4)
    wanted = scenario.job.layout

    def fails(smaller):
        return smaller.history.strikes >= 1 and smaller.job.layout == wanted

    found = shrink(scenario, fails, tries=1000)
    assert found.history.strikes == 1
    assert found.job.layout == wanted
    assert found.job.training.precision == "fp32"
    assert not found.job.model.shared


def test_shrinking_asks_no_more_often_than_it_may():
    asked = []
    scenario = draw_scenario(0)
    assert shrink(scenario, lambda one: bool(asked.append(one)), tries=3) == scenario
    assert len(asked) == 3


def test_what_is_simpler_can_be_started(tmp_path):
    text = prepare_random_text(tmp_path)
    for seed in SEEDS:
        for scenario in simplifications(draw_scenario(seed)):
            for launch in scenario.history.launches:
                processes = scenario.job.layout.ranks + launch.spares
                parse(scenario.launch_flags(launch, text, tmp_path), processes)


def test_results_are_read_as_they_were_added_without_a_line_that_was_cut(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    results = Results(path)
    assert results.read() == []
    results.add(WRONG)
    results.add(RESULT)
    with path.open("a") as file:
        file.write('{"seed": 9, "sour')
    assert results.read() == [RESULT, WRONG]
    assert results.read("abc") == [RESULT, WRONG]
    assert results.read("other") == []


def test_the_newest_result_of_a_seed_counts(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add(dataclasses.replace(RESULT, seconds=1.0))
    results.add(RESULT)
    assert results.read() == [RESULT]


def test_the_longest_row_without_a_failure_is_counted():
    row = [dataclasses.replace(RESULT, seed=seed) for seed in range(5)]
    assert longest_row([*row[:2], WRONG, *row[2:]]) == 3
    assert longest_row([WRONG]) == 0


def test_the_report_names_totals_histograms_and_failures():
    output = io.StringIO()
    print_report([RESULT, WRONG], "abc", Console(file=output, width=200))
    text = output.getvalue()
    for word in ("LOCALIZED", "pp2", "barrier", "outside", "tied", "bits: no end", "0.01"):
        assert word in text


def test_a_story_can_be_read_again(tmp_path):
    scenario = draw_scenario(3)
    (tmp_path / "ran" / "launch0" / "events").mkdir(parents=True)
    story = tmp_path / "story"
    complaint = Complaint("bits", "no end")
    keep_story(scenario, [complaint], tmp_path / "ran", tmp_path / "text", story)
    assert read_story(story) == scenario
    assert "bits: no end" in (story / "complaints.txt").read_text()
    assert "run_local.sh" in (story / "commands.sh").read_text()
    assert (story / "launch0" / "events").is_dir()


@pytest.mark.parametrize("text", ["", "{}", '{"seed": 1, "job": {}, "history": []}'])
def test_what_is_no_story_is_refused(tmp_path, text):
    (tmp_path / "scenario.json").write_text(text)
    with pytest.raises(UserError, match="is no scenario"):
        read_story(tmp_path)


def take_out():
    """Takes a mend out of this process, each rank another one."""
    from tests.harness.explorer.mends import WITHOUT  # noqa: PLC0415  (Megatron)

    WITHOUT[list(Mend)[int(os.environ["RANK"])]]()


@pytest.mark.distributed
def test_what_mends_have_changed_is_still_there_to_be_replaced(megatron_fork_server):
    megatron_fork_server.run(take_out, world_size=len(Mend)).check()
