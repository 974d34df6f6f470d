# SPDX-License-Identifier: Apache-2.0
"""A reporter says on each rank what that rank is to say, once and in Megatron's words."""

import math
from datetime import timedelta

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_moevement.errors import UserError
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.outcome.account import RankAccount, RecoveryAccount
from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.runtime.coordination.progress import IterationCosts, Spent
from megatron_moevement.runtime.observation.events import EventName, read_events
from megatron_moevement.training.reporting.interval import NO_TOTALS, Totals
from megatron_moevement.training.reporting.plots import losses_from_events
from megatron_moevement.training.reporting.reporter import Reporter


def _scalars(directory):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        name: {event.step: event.value for event in accumulator.Scalars(name)}
        for name in accumulator.Tags()["scalars"]
    }


def test_the_last_rank_prints_a_line_for_each_interval(
    logging_config, reported_run, step_arguments, capsys
):
    config = logging_config("--log-interval", "2", "--log-throughput")
    with Reporter(config, reported_run()) as reporter:
        for k in range(1, 6):
            reporter.step(*step_arguments(k, loss=float(k)), {"load_balancing_loss": 1.0})
    first, second = capsys.readouterr().out.splitlines()
    assert " iteration        2/       6 | consumed samples:           16 |" in first
    assert "(ms): 150.0 | throughput per GPU (TFLOP/s/GPU): 3.3 | learning rate: 2.0" in first
    assert " lm loss: 1.500000E+00 | load_balancing_loss: 1.000000E+00 | loss scale" in first
    assert " iteration        4/       6 |" in second
    assert " lm loss: 3.500000E+00 |" in second


def test_other_ranks_print_and_write_nothing(
    logging_config, reported_run, step_arguments, tmp_path, capsys
):
    config = logging_config("--log-interval", "1", "--tensorboard-dir", str(tmp_path / "tb"))
    with Reporter(config, reported_run(rank=0)) as reporter:
        reporter.step(*step_arguments(1))
        reporter.evaluation(1, "validation", 2.0, timedelta(seconds=1))
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "tb").exists()


def test_a_skipped_step_is_counted_and_its_loss_is_not(
    logging_config, reported_run, step_arguments, capsys
):
    with Reporter(logging_config("--log-interval", "2"), reported_run()) as reporter:
        reporter.step(*step_arguments(1, loss=3.0))
        overflow = {"loss": math.inf, "found_inf": (False, True), "grad_norm": None}
        reporter.step(*step_arguments(2, **overflow))
    line = capsys.readouterr().out
    assert " lm loss: 3.000000E+00 |" in line
    assert "grad norm" not in line
    assert "skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_a_step_reported_again_after_a_restart_changes_no_line(
    logging_config, reported_run, step_arguments, capsys
):
    lines = []
    for repeats in (1, 2):
        with Reporter(logging_config("--log-interval", "3"), reported_run()) as reporter:
            for k in (1, 2, 3):
                for _ in range(repeats if k == 2 else 1):
                    reporter.step(*step_arguments(k, loss=float(k)))
        lines.append(capsys.readouterr().out.partition("] ")[2])
    assert lines[0] == lines[1]


def test_scalars_have_megatron_names(logging_config, reported_run, step_arguments, tmp_path):
    config = logging_config(
        "--log-interval", "2", "--log-throughput", "--log-timers-to-tensorboard",
        "--log-memory-to-tensorboard", "--log-world-size-to-tensorboard",
        "--log-validation-ppl-to-tensorboard", "--tensorboard-dir", str(tmp_path),
    )  # fmt: skip
    costs = IterationCosts(host_bytes=1024, spent=Spent(await_copy_s=0.5))
    with Reporter(config, reported_run()) as reporter:
        for k in (1, 2):
            auxiliary = {"load_balancing_loss": 1.5, "z_loss": 0.25}
            reporter.step(*step_arguments(k, loss=2.0 * k), auxiliary, costs)
        reporter.evaluation(2, "validation", 3.0, timedelta(seconds=1))
        reporter.evaluation(2, "validation", 2.75, timedelta(seconds=1), is_final=True)
        reporter.evaluation(2, "test", 3.5, timedelta(seconds=1), is_final=True)
    scalars = _scalars(tmp_path)
    assert scalars["lm loss"] == {1: 2.0, 2: 4.0}
    assert scalars["lm loss vs samples"] == {8: 2.0, 16: 4.0}
    assert scalars["learning-rate"] == {1: pytest.approx(0.001), 2: pytest.approx(0.002)}
    assert scalars["loss-scale"] == {1: 1.0, 2: 1.0}
    assert scalars["grad-norm"] == {1: 0.5, 2: 0.5}
    assert scalars["batch-size"] == {1: 8.0, 2: 8.0}
    assert scalars["world-size"] == {1: 2.0, 2: 2.0}
    assert scalars["load_balancing_loss"] == {1: 1.5, 2: 1.5}
    assert scalars["z_loss"] == {1: 0.25, 2: 0.25}
    assert scalars["iteration-time"] == {2: pytest.approx(0.15)}
    assert scalars["throughput"] == {2: pytest.approx(10 / 3)}
    assert scalars["lm loss validation"] == {2: 3.0}
    assert scalars["lm loss validation vs samples"] == {16: 3.0}
    assert scalars["lm loss validation ppl"] == {2: pytest.approx(math.exp(3.0))}
    assert scalars["lm loss validation at the end"] == {2: 2.75}
    assert scalars["lm loss validation at the end vs samples"] == {16: 2.75}
    assert scalars["lm loss test"] == {2: 3.5}
    assert scalars["moevement/stall-time"] == {1: 0.5, 2: 0.5}
    assert scalars["moevement/host-bytes"] == {1: 1024.0, 2: 1024.0}
    assert scalars["mem-max-resident-bytes"][2] >= scalars["mem-resident-bytes"][2] > 1 << 20


def test_what_is_not_asked_for_is_no_scalar(logging_config, reported_run, step_arguments, tmp_path):
    config = logging_config(
        "--log-interval", "1", "--tensorboard-dir", str(tmp_path),
        "--tensorboard-log-interval", "2", "--no-log-loss-scale-to-tensorboard",
    )  # fmt: skip
    with Reporter(config, reported_run()) as reporter:
        for k in (1, 2, 3):
            reporter.step(*step_arguments(k))
    scalars = _scalars(tmp_path)
    assert scalars["lm loss"] == {2: 2.0}
    samples = {name for name in scalars if name.endswith(" vs samples")}
    assert scalars.keys() - samples == {"batch-size", "grad-norm", "learning-rate", "lm loss"}


def test_totals_are_scalars_over_iterations_and_samples(
    logging_config, reported_run, step_arguments, tmp_path
):
    config = logging_config("--log-interval", "2", "--tensorboard-dir", str(tmp_path))
    with Reporter(config, reported_run()) as reporter:
        reporter.step(*step_arguments(1), totals=Totals(num_zeros=0, params_norm=2.0))
        reporter.step(*step_arguments(2), totals=NO_TOTALS)
    scalars = _scalars(tmp_path)
    assert scalars["num-zeros"] == {1: 0.0}
    assert scalars["num-zeros vs samples"] == {8: 0.0}
    assert scalars["params-norm"] == {1: 2.0}


def test_auxiliary_losses_are_asked_for_when_they_are_shown(logging_config, reported_run, tmp_path):
    with Reporter(logging_config("--log-interval", "3"), reported_run()) as reporter:
        assert [k for k in range(1, 7) if reporter.wants_collected(k)] == [3, 6]
    config = logging_config(
        "--log-interval", "3", "--tensorboard-dir", str(tmp_path), "--tensorboard-log-interval", "2"
    )
    asked = []
    for rank in (0, 1):
        with Reporter(config, reported_run(rank=rank)) as reporter:
            asked.append([k for k in range(1, 7) if reporter.wants_collected(k)])
    assert asked == [[2, 3, 4, 6]] * 2


def test_every_rank_records_its_events(logging_config, reported_run, step_arguments, tmp_path):
    config = logging_config("--moevement-event-dir", str(tmp_path))
    spent = Spent(0.01, 0.02, {1: 0.03, 2: 0.04}, 0.05, 0.0625, 0.125, 0.0625)
    costs = IterationCosts(10, 20, 30, 40, 50, spent)
    for rank in (0, 1):
        with Reporter(config, reported_run(rank=rank)) as reporter:
            reporter.events.emit(EventName.PROCESS_START, 0)
            reporter.step(*step_arguments(1, loss=2.5), costs=costs, ended_s=1000.0)
            reporter.evaluation(1, "validation", 2.0, timedelta(seconds=1))
            reporter.checkpoint(1, timedelta(seconds=2), None)
            reporter.checkpoint(1, timedelta(seconds=2), "the disk is full")
    events = read_events(tmp_path)
    for rank in (0, 1):
        mine = [event for event in events if event.logical_rank == rank]
        assert [event.event.value for event in mine] == [
            "process_start",
            "iteration",
            "evaluation",
            "checkpoint_saved",
            "checkpoint_failed",
        ]
        shared = {
            "loss": 2.5,
            "learning_rate": 0.001,
            "loss_scale": 1.0,
            "grad_norm": 0.5,
            "skipped": 0,
        }
        assert mine[1].fields == {
            "steps": 1,
            "duration_s": 0.1,
            "began_s": 999.9,
            "ended_s": 1000.0,
            "stall_s": 0.25,
            "captured_bytes": 10,
            "metadata_bytes": 50,
            "replicated_bytes": 20,
            "log_bytes": 30,
            "host_bytes": 40,
            "copy_s": 0.01,
            "hash_s": 0.02,
            "send_s": {"1": 0.03, "2": 0.04},
            "log_s": 0.05,
            "await_copy_s": 0.0625,
            "await_room_s": 0.125,
            "await_log_s": 0.0625,
            **(shared if rank == 0 else {}),
        }
        assert mine[3].fields == {"duration_s": 2.0}
        assert mine[4].fields == {"duration_s": 2.0, "reason": "the disk is full"}


def test_rank_0_records_the_losses_before_a_recovery_again(
    logging_config, reported_run, step_arguments, tmp_path
):
    config = logging_config(
        *("--moevement-event-dir", str(tmp_path), "--moevement-event-interval", "2")
    )
    losses = {step: float(step) for step in range(1, 8)}
    for rank in (0, 1):
        with Reporter(config, reported_run(rank=rank, generation=1)) as reporter:
            reporter.past_losses(losses, 7)
            for k in (8, 9):
                reporter.step(*step_arguments(k, loss=float(k)))
    training, _, _ = losses_from_events(read_events(tmp_path))
    assert training == {step: float(step) for step in range(3, 10)}
    ranks = [one.logical_rank for one in read_events(tmp_path)]
    assert sorted(ranks) == [0, 0, 0, 1, 1]  # of steps 8, and 9 at the end


def test_events_of_many_ranks_stand_for_more_steps(
    logging_config, reported_run, step_arguments, tmp_path
):
    config = logging_config("--moevement-event-dir", str(tmp_path))
    with Reporter(config, reported_run(rank=0, world_size=65)) as reporter:
        reporter.past_losses(dict.fromkeys(range(1, 31), 1.0), 30)
        for k in range(31, 42):
            reporter.step(*step_arguments(k))
    again, *steps = read_events(tmp_path)
    assert again.fields["losses"] == [1.0] * 21  # of two intervals, and the newest one
    assert [(one.iteration, one.fields["steps"]) for one in steps] == [(40, 10), (41, 1)]


def test_evaluations_on_the_way_and_at_the_end_are_told_apart(logging_config, reported_run, capsys):
    with Reporter(logging_config(), reported_run()) as reporter:
        reporter.evaluation(3, "validation", 2.0, timedelta(seconds=1))
        reporter.evaluation(6, "validation", 2.0, timedelta(seconds=1))
        reporter.evaluation(6, "validation", 1.5, timedelta(seconds=1), is_final=True)
        reporter.evaluation(6, "test", 2.0, timedelta(seconds=1), is_final=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    places = [line.partition(" | ")[0] for line in lines]
    assert places == [
        " validation loss at iteration 3",
        " validation loss at iteration 6",
        " validation loss at iteration 6 on validation set",
        " validation loss at iteration 6 on test set",
    ]


def test_rank_0_tells_of_checkpoints_and_of_failed_ones(
    logging_config, reported_run, step_arguments, tmp_path, capsys, caplog
):
    run = reported_run(rank=0, save=str(tmp_path))
    with Reporter(logging_config("--log-progress"), run) as reporter:
        reporter.step(*step_arguments(1))
        reporter.checkpoint(1, timedelta(seconds=1), None)
        reporter.checkpoint(2, timedelta(seconds=1), "No space left on device")
    out = capsys.readouterr().out
    assert out == f"  successfully saved checkpoint from iteration       1 to {tmp_path}\n"
    assert caplog.messages == ["no checkpoint of iteration 2: No space left on device"]
    log = (tmp_path / "progress.txt").read_text().splitlines()
    assert len(log) == 2
    assert "Job throughput: 5.0 TFLOP/s/GPU" in log[1]
    assert "Floating-point operations: 1.00e+12" in log[1]


def test_a_progress_log_needs_a_folder(logging_config, reported_run):
    with pytest.raises(UserError, match=r"--log-progress .* give --save"):
        Reporter(logging_config("--log-progress"), reported_run())


def test_a_writer_that_fails_to_open_leaves_nothing_open(logging_config, reported_run, tmp_path):
    (tmp_path / "file").touch()
    config = logging_config(
        "--moevement-event-dir", str(tmp_path / "events"),
        "--tensorboard-dir", str(tmp_path / "file"),
    )  # fmt: skip
    with pytest.raises(UserError, match="--tensorboard-dir"):
        Reporter(config, reported_run())


def test_phase_times_are_printed_where_they_are_known(logging_config, reported_run, capsys):
    with Reporter(logging_config(), reported_run()) as reporter:
        reporter.phase_times(None)
        reporter.phase_times("(min, max) time across ranks (ms):")
    assert capsys.readouterr().out == "(min, max) time across ranks (ms):\n"


def test_a_recovery_is_drawn_at_the_step_that_it_led_to(logging_config, reported_run, tmp_path):
    own = RankAccount(3, None, {"detect": 1.0, "replay": 2.5}, owed_copies=0)
    account = RecoveryAccount(2, Verdict.LOCALIZED, (1,), 40, Level.EXACT, [own])
    for rank in (0, 1):
        config = logging_config("--tensorboard-dir", str(tmp_path / str(rank)))
        with Reporter(config, reported_run(rank=rank)) as reporter:
            reporter.recovery(account)
    assert _scalars(tmp_path / "1") == {
        "moevement/recovery-time": {40: 3.5},
        "moevement/recovery-replayed-steps": {40: 3.0},
        "moevement/recovery-generation": {40: 2.0},
        "moevement/recovery-verdict/LOCALIZED": {40: 1.0},
    }
    assert not (tmp_path / "0").exists()  # the last rank alone draws
