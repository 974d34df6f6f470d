# SPDX-License-Identifier: Apache-2.0
"""`progress.txt` has Megatron-LM's form and adds up throughput over restarts."""

from datetime import datetime, timedelta

import pytest

from megatron_moevement.errors import UserError
from megatron_moevement.training.reporting.progress_log import (
    ProgressLog,
    cumulative_tflops_per_gpu,
)

SAVED = {"job_tflops": 12.34, "flops": 5e15, "tokens": 2 * 10**9}
LATER = datetime(2026, 1, 1, 1)


def _line(time: str, ranks: int, text: str) -> str:
    return f"2026-01-01 {time}\tJob ID: \t# GPUs: {ranks}\t{text}\n"


def _saved(flops: float) -> str:
    return (
        "Saved checkpoint\tIteration: 1\tJob throughput: 1.0 TFLOP/s/GPU\t"
        f"Cumulative throughput: 1.0 TFLOP/s/GPU\tFloating-point operations: {flops:.2e}\t"
        "Tokens (in billions): 0.00"
    )


def test_start_and_checkpoint_are_lines_of_tabbed_fields(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    log = ProgressLog(str(tmp_path / "new"), world_size=4)
    log.checkpoint(10, datetime.now() + timedelta(seconds=100), **SAVED)
    start, saved = (tmp_path / "new" / "progress.txt").read_text().splitlines()
    assert start.split("\t")[1:] == ["Job ID: 77", "# GPUs: 4", "Starting job"]
    fields = saved.split("\t")
    assert fields[1:6] == [
        "Job ID: 77",
        "# GPUs: 4",
        "Saved checkpoint",
        "Iteration: 10",
        "Job throughput: 12.3 TFLOP/s/GPU",
    ]
    assert fields[7:] == ["Floating-point operations: 5.00e+15", "Tokens (in billions): 2.00"]


def test_time_lost_between_jobs_counts():
    log = _line("00:00:00", 4, "Starting job") + _line("00:30:00", 4, "Starting job")
    assert cumulative_tflops_per_gpu(log, 4, 3600 * 4e12, LATER) == 1.0


def test_jobs_of_another_size_do_not_count():
    log = (
        _line("00:00:00", 8, "Starting job")
        + _line("00:10:00", 8, _saved(1e15))
        + _line("00:30:00", 4, "Starting job")
    )
    assert cumulative_tflops_per_gpu(log, 4, 1e15 + 1800 * 4e12, LATER) == 1.0


def test_a_job_of_another_size_in_between_starts_the_count_anew():
    log = (
        _line("00:00:00", 4, "Starting job")
        + _line("00:10:00", 4, _saved(1e15))
        + _line("00:20:00", 8, "Starting job")
        + _line("00:30:00", 4, "Starting job")
    )
    assert cumulative_tflops_per_gpu(log, 4, 1e15 + 1800 * 4e12, LATER) == 1.0


def test_a_log_without_a_start_has_no_throughput():
    assert cumulative_tflops_per_gpu("", 4, 1e15, LATER) == 0.0


def test_a_folder_that_can_not_be_written_is_the_users_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--log-progress: .*give a writable --save"):
        ProgressLog(str(tmp_path / "file"), world_size=1)


def test_a_log_that_was_taken_away_costs_a_line_only(tmp_path, caplog):
    log = ProgressLog(str(tmp_path / "save"), world_size=1)
    (tmp_path / "save" / "progress.txt").unlink()
    (tmp_path / "save").rmdir()
    log.checkpoint(10, LATER, **SAVED)
    assert "a line is lost" in caplog.text
