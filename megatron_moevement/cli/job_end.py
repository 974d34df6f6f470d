# SPDX-License-Identifier: Apache-2.0
"""Why processes and jobs end, and what to do then, in a line."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.report.casualties import Casualty
from megatron_moevement.policy.report.last_lines import JobEnd
from megatron_moevement.runtime.observation.process_events import Child, tell_end

if TYPE_CHECKING:
    from megatron_moevement.runtime.coordination.roll_call import JobStop

logger = logging.getLogger(__name__)
_MEANINGS = {
    ExitCode.STATE_FLUSHED: "it stopped with its state kept",
    ExitCode.INTERRUPTED: "Ctrl-C",
    ExitCode.BAD_ARGUMENTS: "flags, data or machine don't fit",
}


def describe_status(status: int) -> str:
    """Returns how a process ended.

    Args:
        status: its exit status, or the negative number of the signal that killed it.
    """
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"was killed by {name}"
    meaning = next((text for code, text in _MEANINGS.items() if code == status), "it failed")
    return f"ended with exit code {status}" + (f" ({meaning})" if status else "")


def event_dir_of(flags: Sequence[str]) -> str | None:
    """Returns the folder of events that flags name, or their `--yaml-cfg`; None where neither does.

    Raises:
        UserError: the file can't be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--moevement-event-dir")
    parser.add_argument("--yaml-cfg", nargs="*", default=())
    found, _ = parser.parse_known_args(flags)
    named: str | None = found.moevement_event_dir
    if named is not None or not found.yaml_cfg:
        return named
    from megatron_moevement.training.yaml_arguments import settings_of  # noqa: PLC0415  (for it)

    folders = [settings_of(Path(path)).get("moevement_event_dir") for path in found.yaml_cfg]
    return next((str(folder) for folder in reversed(folders) if folder), None)


class RecordedEnds:
    """Records how the processes of a launch end among its events: who is killed can't say it."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Gives the launch a name; its processes are started now.

        Args:
            flags: of the job. Ends are recorded where one of them names a folder of events.
        """
        self._folder = event_dir_of(flags)
        self._started_s = time.time()
        self.launch = secrets.token_hex(4)
        """Its name, for the environment of its processes."""

    def record(self, process: int, pid: int, status: int) -> None:
        """Records an end.

        Args:
            process: its number in the job.
            status: its exit status, or the negative number of the signal that killed it.
        """
        child = Child(self.launch, process, pid, self._started_s)
        tell_end(self._folder, child, status)


def report_death(process: int, status: int) -> None:
    """Reports how a process ended that did not end by itself."""
    logger.warning("process %d %s", process, describe_status(status))


def report_end(
    code: int, ends: Sequence[tuple[int, int]], flags: Sequence[str], stop: JobStop | None
) -> JobEnd:
    """Reports why a job ended, and what to do, where no process did.

    Args:
        ends: number and status of each process, in the order of ends.
        stop: why the processes stopped the job, where they noted it.

    Returns:
        What is known of the end.
    """
    losses = [] if stop is None else stop.losses
    events = event_dir_of(flags)
    end = JobEnd(
        code,
        ends,
        host=socket.gethostname(),
        is_protected=any(flag.endswith("moevement") for flag in flags),
        reason=None if stop is None else stop.reason,
        casualties=[Casualty(**dataclasses.asdict(loss)) for loss in losses],
        event_dir=None if events is None else os.path.abspath(events),
    )
    line = end.line(describe_status)
    if line is not None:
        logger.log(logging.INFO if code == ExitCode.DONE else logging.ERROR, "%s", line)
    return end


def end_document(end: JobEnd) -> dict[str, Any]:
    """Returns the end of a job for programs."""
    return {
        "code": end.code,
        "end": describe_status(end.code),
        "reason": end.reason,
        "event_dir": end.event_dir,
        "processes": [
            {"process": process, "code": status, "end": describe_status(status)}
            for process, status in end.ends
        ],
        "losses": [
            {name: getattr(one, name) for name in ("process", "rank", "host", "reason")}
            for one in end.casualties
        ],
    }
