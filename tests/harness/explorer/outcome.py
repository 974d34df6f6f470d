# SPDX-License-Identifier: Apache-2.0
"""What came of a scenario: what each launch left, as the oracle reads it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.facts.facts_document import FACTS, load_facts
from megatron_moevement.runtime.observation.events import EventRecord, kept_documents, read_events
from megatron_moevement.settings.faults import Fault
from tests.harness.explorer.history import Launch
from tests.harness.log_lines import without_prefixes

_STRUCK = re.compile(r"^--moevement-faults: (?P<fault>\S+)$", re.MULTILINE)
NEVER_STRUCK = "never struck"
"""What a job says at its end of a fault that was to strike and did not."""


@dataclasses.dataclass(frozen=True)
class Killed:
    """A process that was killed from outside.

    Attributes:
        process: its number in the launch.
        time: seconds since the epoch.
        forgot: whether what it kept in memory was removed.
    """

    process: int
    time: float
    forgot: bool


@dataclasses.dataclass(frozen=True)
class LaunchOutcome:
    """What a launch left.

    Attributes:
        launch: as it was drawn.
        folder: of its events and its output.
        pids: of its processes, by their numbers.
        exit_codes: of its processes; negative for a signal.
        timed_out: whether it had to be ended.
        seconds: how long it took.
        killed: from outside.
        missed: kills whose time never came.
        left: files that lie in the store directory behind it.
        orphans: processes that were there for long after all ranks had ended, and what they do.
    """

    launch: Launch
    folder: Path
    pids: tuple[int, ...]
    exit_codes: tuple[int, ...]
    timed_out: bool
    seconds: float
    killed: tuple[Killed, ...]
    missed: int
    left: tuple[str, ...]
    orphans: tuple[str, ...] = ()

    @property
    def event_dir(self) -> Path:
        """Folder of its events."""
        return self.folder / "events"

    def events(self) -> list[EventRecord]:
        """Returns its events, in the order of time."""
        return read_events(self.event_dir) if self.event_dir.exists() else []

    def facts(self) -> list[tuple[float, Facts]]:
        """Returns the facts of its recoveries with the seconds since the epoch."""
        return [
            (int(path.name.partition("-")[0]) / 1e9, load_facts(path.read_text(), str(path)))
            for path in kept_documents(self.event_dir, FACTS)
        ]

    def struck(self) -> list[tuple[int, Fault]]:
        """Returns the faults that struck, each with the number of the process.

        A process prints a line in front of each; where it has no events yet, that is all it leaves.
        """
        return [
            (process, Fault.parse(found["fault"]))
            for process in range(len(self.pids))
            for found in _STRUCK.finditer(self.output(process))
        ]

    def output(self, process: int) -> str:
        """Returns what a process printed, on both streams; of its log the texts alone."""
        streams = [self.folder / f"rank{process}.{name}" for name in ("stdout", "stderr")]
        printed = [path.read_text(errors="replace") for path in streams if path.exists()]
        return without_prefixes("".join(printed))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a scenario.

    Attributes:
        launches: in the order of time.
        reference: digest of the same training, which nothing protects or strikes.
        digest: of the struck job; None where it never came to its end.
    """

    launches: tuple[LaunchOutcome, ...]
    reference: dict[str, Any]
    digest: dict[str, Any] | None


def read_digest(path: Path) -> dict[str, Any] | None:
    """Returns a digest, None where there is none."""
    if not path.exists():
        return None
    digest: dict[str, Any] = json.loads(path.read_text())
    return digest
