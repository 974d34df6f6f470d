# SPDX-License-Identifier: Apache-2.0
"""`moevement losses`, on events and a manifest that are written down here."""

import json
import math

import pytest

from megatron_moevement.cli import main
from megatron_moevement.runtime.observation.events import EventLog, EventName
from megatron_moevement.training.data.manifest import Manifest, Source, manifest_path

ENTROPY = 3.0


@pytest.fixture
def data(tmp_path):
    """Returns the prefix of data whose unigram entropy is known."""
    prefix = str(tmp_path / "text")
    manifest = Manifest(
        tokenizer={},
        decode_errors="strict",
        append_eod=True,
        dtype="uint16",
        documents=1,
        empty_documents=0,
        tokens=100,
        max_token_id=255,
        unigram_entropy_nats=ENTROPY,
        source=Source(files=1, bytes=100, sha256="0" * 64),
    )
    manifest_path(prefix).write_text(manifest.to_json())
    return prefix


@pytest.fixture
def run(tmp_path):
    """Writes the events of a run: the same training losses, and the given validation losses."""

    def write(*validation, split="validation", final=None):
        folder = tmp_path / "events"
        with EventLog(folder, 0, 0) as events:
            for iteration in range(1, 21):
                events.emit(EventName.ITERATION, iteration, loss=5.0 - iteration / 10)
            for number, loss in enumerate(validation, start=1):
                events.emit(EventName.EVALUATION, 10 * number, split=split, loss=loss)
            if final is not None:
                events.emit(EventName.EVALUATION, 20, split=split, loss=final, is_final=True)
        return str(folder)

    return write


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def test_the_table_has_the_first_and_last_losses_and_the_entropy(run, data, capsys):
    assert main(["losses", run(4.5, 2.25), "--data", data]) == 0
    told = capsys.readouterr().out
    for text in ("4.9000 (1)", "3.0000 (20)", "4.5000 (10)", "2.2500 (20)", "3.0000"):
        assert text in told


@pytest.mark.parametrize(("margin", "code"), [(0.5, 0), (0.75, 0), (0.8, 1)])
def test_the_last_validation_loss_is_judged(run, data, capsys, margin, code):
    assert main(["losses", run(4.5, 2.25), "--data", data, f"--below-entropy={margin}"]) == code
    verdict = "too high" if code else "low enough"
    assert last_line(capsys) == (
        f"validation loss 2.2500 is {verdict}: "
        f"{margin} nats below the unigram entropy, 3.0000, are required"
    )


def test_an_earlier_validation_loss_does_not_count(run, data):
    assert main(["losses", run(2.25, 4.5), "--data", data, "--below-entropy=0.5"]) == 1


def test_the_loss_after_the_training_is_told_apart(run, capsys):
    assert main(["losses", run(4.5, 2.25, final=2.0)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.replace("│", "").splitlines()]
    assert ["validation", "4.5000", "(10)", "2.2500", "(20)"] in rows
    assert ["validation", "at", "the", "end", "2.0000", "(20)"] in rows


@pytest.mark.parametrize(
    ("last", "final", "code"),
    [(2.25, 2.0, 0), (2.75, 2.0, 1), (2.0, 2.75, 1), (2.0, math.nan, 1), (math.nan, 2.0, 1)],
)
def test_both_last_validation_losses_must_be_low_enough(run, data, last, final, code):
    events = run(4.5, last, final=final)
    assert main(["losses", events, "--data", data, "--below-entropy=0.5"]) == code


def test_a_loss_that_is_no_number_is_too_high(run, data, capsys):
    assert main(["losses", run(2.25, math.nan), "--data", data, "--below-entropy=0"]) == 1
    assert "too high" in last_line(capsys)


def test_without_a_validation_loss_nothing_is_low_enough(run, data, capsys):
    arguments = ["--data", data, "--below-entropy=0"]
    assert main(["losses", run(2.25, split="test"), *arguments]) == 1
    assert last_line(capsys).startswith("no validation loss; 0.0 nats below")


@pytest.mark.parametrize(
    ("with_data", "margin", "hint"),
    [(False, "0.5", "--data"), (True, "-1", "0 or more"), (True, "nan", "finite number")],
)
def test_a_margin_that_makes_no_sense_is_bad_input(run, data, capsys, with_data, margin, hint):
    arguments = ["--data", data] if with_data else []
    assert main(["losses", run(2.25), *arguments, f"--below-entropy={margin}"]) == 2
    told = capsys.readouterr()
    assert (told.out, len(told.err.splitlines())) == ("", 1)
    assert hint in told.err


def test_json_is_one_document_and_the_judgement_is_beside_it(run, data, capsys):
    arguments = ["losses", run(4.5, math.nan), "--data", data, "--json"]
    assert main([*arguments, "--below-entropy", "0.5"]) == 1
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["training"]["20"] == 3.0
    assert document["validation"] == {"10": 4.5, "20": None}
    assert document["unigram_entropy"] == ENTROPY
    assert told.err.startswith("validation loss nan is too high")
