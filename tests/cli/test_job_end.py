# SPDX-License-Identifier: Apache-2.0
"""The line that a launcher ends a job with: why, and what to do."""

import signal

import pytest

from megatron_moevement.cli.job_end import describe_job_end, describe_status
from megatron_moevement.errors import ExitCode


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-64 - 1, "was killed by signal 65"),
        (75, "ended with exit code 75 (it stopped with its state kept)"),
        (130, "ended with exit code 130 (Ctrl-C)"),
        (1, "ended with exit code 1 (it failed)"),
        (0, "ended with exit code 0"),
    ],
)
def test_a_process_ends_by_a_signal_or_a_code(status, told):
    assert describe_status(status) == told


LOST = ["process 1 was killed by SIGKILL"]


@pytest.mark.parametrize(
    ("code", "protected", "told"),
    [
        (ExitCode.DONE, True, "done in spite of what was lost: process 1 was killed by SIGKILL"),
        (ExitCode.STATE_FLUSHED, True, "launch it again as it was to go on"),
        (ExitCode.INTERRUPTED, True, "goes on from the newest checkpoint"),
        (137, True, "what processes keep in memory is still there"),
        (137, False, "goes on from the newest checkpoint"),
        (ExitCode.FAILURE, True, "launch it again as it was to go on"),
    ],
)
def test_an_end_says_what_to_do(code, protected, told):
    line = describe_job_end(code, LOST, protected=protected)
    assert told in line
    assert LOST[0] in line


def test_an_end_without_a_loss_or_with_bad_arguments_needs_no_line():
    assert describe_job_end(ExitCode.DONE, [], protected=True) is None
    assert describe_job_end(ExitCode.BAD_ARGUMENTS, LOST, protected=True) is None
