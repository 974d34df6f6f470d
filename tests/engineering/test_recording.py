# SPDX-License-Identifier: Apache-2.0
"""The picture of the demo's output: the lines that matter, and nothing from the network."""

import html
import importlib.util
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PREFIX = "2026-11-27T10:27:29.153+00:00 node7 rank 0 INFO pretrain_moe.py:"
OUTPUT = f"""
1. A job that nothing interrupts: 4 ranks, 2 pipeline stages x 2 expert-parallel ranks.
{PREFIX} flags, run: --micro-batch-size 4
{PREFIX}  [2026-11-27 10:27:17] iteration      160/     200 | consumed | lm loss: 2.48E+00 | loss |
{PREFIX} LOCALIZED: stage 1 lost state; from the window of step 170
same bits: state and losses of the killed job are those of the other one
"""


@pytest.fixture(scope="module")
def recording():
    spec = importlib.util.spec_from_file_location("recording", DOCS / "recording.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(svg):
    """Returns the text of a picture."""
    return html.unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", svg))).replace("\xa0", " ")


def test_it_has_the_lines_that_matter_without_what_is_the_same_in_each(recording):
    shown = [line.plain for line in recording.shown(OUTPUT.splitlines())]
    assert shown == [
        "1. A job that nothing interrupts: 4 ranks, 2 pipeline stages x 2 expert-parallel ranks.",
        "iteration      160/     200 | … | lm loss: 2.48E+00 |",
        "rank 0 INFO LOCALIZED: stage 1 lost state; from the window of step 170",
        "same bits: state and losses of the killed job are those of the other one",
    ]


def test_the_output_is_passed_on_and_its_picture_written(recording, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(OUTPUT))
    assert recording.main([str(tmp_path / "demo.svg")]) == 0
    assert capsys.readouterr().out == OUTPUT
    svg = (tmp_path / "demo.svg").read_text(encoding="utf-8")
    assert "LOCALIZED: stage 1 lost state" in words(svg)
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}


def test_without_a_file_it_says_what_it_needs(recording, capsys):
    assert recording.main([]) == 2
    assert "give the file to write" in capsys.readouterr().err


def test_the_picture_of_the_pages_is_of_a_demo_that_succeeded():
    text = words((DOCS / "use" / "first_fault.svg").read_text(encoding="utf-8"))
    for part in (
        "SIGKILL strikes rank 2",
        "LOCALIZED, stage 1 replayed 4 steps",
        "same bits: state",
    ):
        assert part in text
