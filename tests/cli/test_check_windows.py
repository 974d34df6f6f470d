# SPDX-License-Identifier: Apache-2.0
"""What `moevement check` predicts of W, by what is given and what is measured."""

import argparse

import pytest
from rich.console import Console

from megatron_moevement.cli import check_windows
from megatron_moevement.cli.check_windows import WindowPrediction
from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.operators import Inventory, Operator, OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.preflight.forecast import JobForecast, WindowOptions
from megatron_moevement.policy.preflight.window_forecast import Rates
from megatron_moevement.policy.window.schedule import WindowSchedule

GATE = OperatorId(OperatorKind.GATE, 0)
MB = 10**6
SLOTS = {1: 1200 * MB, 2: 800 * MB, 4: 500 * MB, 8: 400 * MB}
MEASURED = Rates(2e9, 1e9)


def predicted(*flags, measured=None, replicas=2, is_chosen=False):
    """Returns the prediction for a job whose fixed W is 1, or that chooses."""
    parser = argparse.ArgumentParser()
    check_windows.add_flags(parser)
    inventory = Inventory({LogicalRank(): (Operator(GATE, 12, 2),)})
    job = JobForecast(
        processes=(),
        schedule=WindowSchedule(inventory, 1, {GATE: 0}),
        replicas=(2, replicas),
        lag=1,
        train_iters=100,
        computes_on_host=False,
        windows=lambda: WindowOptions(4, SLOTS, is_chosen),
    )
    return WindowPrediction.of(parser.parse_args(flags), job, measured)


def text_of(prediction):
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        for each in prediction.shown():
            console.print(each, soft_wrap=isinstance(each, str), markup=False)
    return captured.get()


def test_without_bandwidths_nothing_is_predicted():
    assert predicted("--iteration-time", "1") is None


def test_without_an_iteration_the_table_says_which_one_hides_each_w():
    title, titles, *rows, hint = text_of(predicted(measured=MEASURED)).splitlines()
    assert "makes checksums at 2.0 GB/s, and sends to each of 2 holders at 1.0 GB/s" in title
    assert " ".join(titles.split()) == "W largest slot hidden from (s) replayed steps"
    assert [" ".join(row.split()) for row in rows] == [
        "1 1.2 GB 1.2 1",
        "2 800.0 MB 0.8 3",
        "4 500.0 MB 0.5 7",
        "8 400.0 MB 0.4 15",
    ]
    assert "--iteration-time" in hint


def test_with_an_iteration_it_says_what_waits_and_what_auto_comes_to():
    lines = text_of(predicted("--iteration-time", "1.1", measured=MEASURED)).splitlines()
    assert " ".join(lines[2].split()) == "1 1.2 GB 1.2 0.1 1"
    assert lines[-1] == (
        "iterations of 1.1 s: --moevement-window auto would come to W = 2, which hides its slots; "
        "this job keeps W = 1, which waits 0.1 s in each"
    )
    chosen = predicted("--iteration-time=0.1", measured=MEASURED, is_chosen=True)
    assert text_of(chosen).splitlines()[-1].endswith("W = 8, which waits 0.3 s in each")


def test_what_is_given_wins_over_what_is_measured():
    halved = predicted("--network-bandwidth", "1", measured=MEASURED)
    assert halved.rates == Rates(2e9, 0.5e9)  # two copies share it
    assert predicted("--bandwidth", "3", measured=MEASURED).rates == Rates(3e9, 1e9)
    assert predicted("--bandwidth", "3").rates == Rates(3e9, None)
    alone = predicted("--bandwidth", "3", "--network-bandwidth", "1", replicas=0)
    assert alone.rates == Rates(3e9, None)


def test_a_network_without_a_copy_into_memory_predicts_nothing():
    with pytest.raises(UserError, match="give --bandwidth, too"):
        predicted("--network-bandwidth", "1")


def test_programs_read_bytes_and_seconds():
    found = predicted("--iteration-time", "1.1", measured=MEASURED).document()
    assert found["rates"] == {"to_host_bytes_per_s": 2e9, "to_holder_bytes_per_s": 1e9}
    assert (found["iteration_s"], found["chosen"]) == (1.1, 2)
    first = {"window": 1, "slot_bytes": 1200 * MB, "replayed_steps": 1, "hiding_s": 1.2}
    assert found["windows"][0] == {**first, "stall_s": 1.2 - 1.1}
    without = predicted(measured=MEASURED).document()
    assert without["chosen"] is None
    assert without["windows"][0] == {**first, "stall_s": None}
