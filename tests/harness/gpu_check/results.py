# SPDX-License-Identifier: Apache-2.0
"""What the parts of a check found: one JSON file for each, and a table of all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

_NEWLINE = "\n"


class State(Enum):
    """What a part came to."""

    GREEN = "green"
    RED = "red"
    NEEDS_GPU = "needs a GPU"


class Scale(Enum):
    """How much is computed."""

    SMALL = "small"
    """Runs on a CPU, and shows that the command works."""
    FULL = "full"
    """Is worth measuring on a GPU."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a part found.

    Attributes:
        figures: by name; what JSON can hold.
        problems: what is not as it must be, each in a line.
    """

    figures: Mapping[str, Any]
    problems: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a result holds for: another one means that the part has to run again.

    Attributes:
        machine: the GPU, or else the processor, and torch.
        sources: digest of the files that are checked.
    """

    machine: str
    sources: str
    scale: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What a part came to, as it is written.

    Attributes:
        began: when, in UTC.
    """

    part: str
    state: State
    began: str
    duration_s: float
    conditions: Conditions
    figures: Mapping[str, Any]
    problems: Sequence[str]

    def holds_for(self, conditions: Conditions) -> bool:
        """Returns whether the part need not run again."""
        return self.state is State.GREEN and self.conditions == conditions

    def save(self, folder: Path) -> None:
        """Writes the file: all of it, or nothing."""
        document = dataclasses.asdict(self) | {"state": self.state.value}
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{self.part}.{os.getpid()}.partial"
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / f"{self.part}.json")


def newest(folder: Path, part: str) -> Result | None:
    """Returns the newest result of a part; None where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads((folder / f"{part}.json").read_text(encoding="utf-8"))
        document["state"] = State(document["state"])
        document["conditions"] = Conditions(**document["conditions"])
        return Result(**document)
    return None


def table(results: Sequence[Result]) -> str:
    """Returns a table of results, with figures and problems, for all that hold alike."""
    found: dict[Conditions, list[Result]] = {}
    for result in results:
        found.setdefault(result.conditions, []).append(result)
    return "\n".join(_table_of(conditions, alike) for conditions, alike in found.items())


def _table_of(conditions: Conditions, results: Sequence[Result]) -> str:
    lines = [f"{conditions.machine}, {conditions.scale}, sources {conditions.sources}", ""]
    lines += ["| part | state | s | figures |", "|---|---|---|---|"]
    for result in results:
        told = [f"{key}: {_shown(value)}" for key, value in result.figures.items()]
        told += [f"**{problem.partition(_NEWLINE)[0]}**" for problem in result.problems]
        duration = f"{result.duration_s:.0f}"
        lines.append(f"| {result.part} | {result.state.value} | {duration} | {'; '.join(told)} |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
