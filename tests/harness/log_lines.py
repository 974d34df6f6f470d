# SPDX-License-Identifier: Apache-2.0
"""The lines of a program's log, read back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_LINE = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00) (?P<host>\S+) "
    r"(?P<place>rank \d+|rank \?|spare \d+|launcher|batch|task \d+) (?P<level>[A-Z]+) "
    r"(?P<program>pretrain_moe\.py|train_moe\.sbatch|moevement [a-z]+): (?P<text>.*)$",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class LogLine:
    """A line with what is told of it."""

    time: str
    host: str
    place: str
    level: str
    program: str
    text: str


def log_lines(output: str) -> Iterator[LogLine]:
    """Yields the lines of the log in what a process wrote; what others wrote is left out."""
    for found in _LINE.finditer(output):
        yield LogLine(**found.groupdict())


def without_prefixes(output: str) -> str:
    """Returns what a process wrote, with the texts of its log alone."""
    return _LINE.sub(lambda found: found["text"], output)
