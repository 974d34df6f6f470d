# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of each process of a job, as events."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.accounting.event import EventName
from megatron_moevement.runtime.observation.event_file import PATIENCE_S
from megatron_moevement.runtime.observation.events import open_events
from megatron_moevement.runtime.patience import attempt
from megatron_moevement.settings.launch import Launch

SCHEMA = 3
"""Of the events; the first one had no number."""
NO_RANK = -1
"""Of a process that has no place in the job, or not yet."""


class ProcessEvents:
    """Records what a process does outside of generations; its training thread uses it."""

    def __init__(self, directory: str | None, launch: Launch) -> None:
        """Records nothing yet.

        Args:
            directory: of the events; None: there are none.
        """
        self._directory = directory
        self._launch = launch

    def launched(self) -> None:
        """Records that the process runs, and what tells it from all others."""
        self._tell(
            EventName.LAUNCHED,
            0,
            schema=SCHEMA,
            launch=self._launch.name,
            process=self._launch.process,
            processes=self._launch.processes,
            host=socket.gethostname(),
            started_s=started_s(os.getpid()),
            slurm_job=os.environ.get("SLURM_JOB_ID"),
        )

    def waits(self, generation: int) -> None:
        """Records that the process waits for a place in a generation."""
        self._tell(EventName.SPARE, generation)

    def ends(self, code: int) -> None:
        """Records with which code the process ends."""
        self._tell(EventName.PROCESS_END, 0, child=os.getpid(), code=code)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Records the end of a process that an exception ends; the exception goes on."""
        try:
            yield
        except UserError as error:
            self.ends(error.exit_code)
            raise
        except SystemExit as leaving:
            code = leaving.code
            self.ends(code if isinstance(code, int) else int(code is not None))
            raise
        except Exception:
            self.ends(ExitCode.FAILURE)  # Python's own, after the traceback
            raise

    def _tell(self, event: EventName, generation: int, **fields: Any) -> None:
        _tell(self._directory, event, generation, **fields)


def _tell(directory: str | None, event: EventName, generation: int = 0, **fields: Any) -> bool:
    """Records an event of no rank; a folder that can't be written is for the ranks to refuse.

    Returns:
        Whether it was written, before the patience with the folder was over.
    """
    if directory is None:
        return False

    def write() -> bool:
        with open_events(directory, NO_RANK, generation) as events:
            events.emit(event, 0, **fields)
            return events.is_open

    return bool(attempt(write, PATIENCE_S)[0])


@dataclasses.dataclass(frozen=True)
class Child:
    """A process of a job, as its launcher knows it.

    Attributes:
        launch: name of the launch.
        process: its number in the job.
        pid: None where the launcher lacks it.
        started_s: when it was started, in seconds since the epoch.
    """

    launch: str
    process: int
    pid: int | None
    started_s: float


def tell_end(directory: str | None, child: Child, code: int) -> bool:
    """Records how a process ended; nothing where no process has made the folder.

    Args:
        code: its exit code, negative for a signal.

    Returns:
        Whether it is among the events now.
    """
    if directory is None or not Path(directory).is_dir():
        return False
    return _tell(
        directory,
        EventName.PROCESS_END,
        launch=child.launch,
        process=child.process,
        host=socket.gethostname(),
        child=child.pid,
        started_s=child.started_s,
        code=code,
    )


def started_s(pid: int) -> float | None:
    """Returns when a process was started, in seconds since the epoch; None where it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        ticks = int(after_name.split()[19])
    except (OSError, ValueError, IndexError):
        return None
    up_s = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - up_s)
