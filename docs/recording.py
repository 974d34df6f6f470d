# SPDX-License-Identifier: Apache-2.0
"""Makes a picture of what the demo prints, from its own output.

./scripts/demo.sh 2>&1 | .venv/bin/python docs/recording.py docs/use/first_fault.svg

It keeps the lines of LINES, without what is the same in each; `…` stands for what is left out.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 118
LINES = (
    (r"^(\d\. .*|   SIGKILL .*)$", "bold"),
    (
        r"^\S+ \S+ rank \d+ INFO \S+  \[[^]]*\] (iteration +\d+/ *\d+ \|).*(\| lm loss: \S+ \|).*$",
        "",
    ),
    (r"^(validation loss .* is low enough: .*)$", "green"),
    (r"^\S+ \S+ (rank \d+ INFO) \S+ (protected by: .*|begins: .*|LOCALIZED: .*)$", ""),
    (r"^\S+ \S+ (rank \d+ INFO) \S+ (done: .*)$", ""),
    (r"^\S+ \S+ (rank \d+ (?:INFO|WARNING)) \S+ (step \d+: protection: .*)$", ""),
    (r"^\S+ \S+ (rank \d+ INFO) \S+ (process \d+ goes on .*|generation \d+: .*)$", "cyan"),
    (r"^\S+ \S+ (rank \d+ WARNING) \S+ (--moevement-faults: .*)$", "yellow"),
    (r"^\S+ \S+ (rank \d+ WARNING) \S+ \S+ (loss of .*)$", "yellow"),
    (r"^\S+ \S+ (launcher \w+) moevement launch: (.*?)(?:; `moevement report .*)?$", "yellow"),
    (r"^(same bits: .*)$", "bold green"),
)
"""What is shown, part by part, and how."""
_NOT_OURS = re.compile(r" *@font-face \{.*?\}\n|<!-- .*? -->\n *", re.DOTALL)
"""Fonts that would be loaded from the network, and what made the picture."""
_TITLE = "./scripts/demo.sh"


def shown(lines: Iterable[str]) -> Iterator[Text]:
    """Yields the lines of the picture, as wide as it is."""
    for line in lines:
        plain = line.rstrip()
        for pattern, style in LINES:
            if found := re.match(pattern, plain):
                between = " … " if " | " in plain else " "
                yield Text(between.join(found.groups()), style)
                break


def picture(lines: Iterable[str]) -> str:
    """Returns an SVG of the output; a viewer's own font is used, none is loaded."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for text in shown(lines):
        console.print(text)
    made = _NOT_OURS.sub("", console.export_svg(title=_TITLE, unique_id="demo"))
    lines_of_it = (line.rstrip() for line in made.replace("Fira Code", "ui-monospace").splitlines())
    return "\n".join(lines_of_it) + "\n"


def main(argv: list[str]) -> int:
    """Writes the picture of standard input, which it passes on."""
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write("recording.py: give the file to write, and the output on standard input\n")
        return 2
    lines = []
    for line in sys.stdin:
        sys.stdout.write(line)
        lines.append(line)
    Path(argv[0]).write_text(picture(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
