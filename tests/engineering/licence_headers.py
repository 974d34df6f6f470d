# SPDX-License-Identifier: Apache-2.0
"""Puts the licence at the head of each source file of the repository; `--check` changes nothing.

python tests/engineering/licence_headers.py [--check]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = "SPDX-License-Identifier: Apache-2.0"
HASH = ("*.py", "*.sh", "*.sbatch", ".ci/run", "Dockerfile", "*.yml", "*.yaml")
COMMENTS = {".js": "// {}", ".css": "/* {} */", ".html": "<!-- {} -->"}
"""How a comment looks by suffix; everywhere else it begins with `#`."""

SOURCES = (*HASH, *(f"*{suffix}" for suffix in COMMENTS))
FIRST = ("#!", "# syntax=", "<!DOCTYPE")
"""What only counts in the first line of a file."""


def with_header(text: str, suffix: str = "") -> str:
    """Returns the text of a file with the header."""
    header = COMMENTS.get(suffix, "# {}").format(HEADER)
    lines = text.splitlines(keepends=True)
    place = 1 if text.startswith(FIRST) else 0
    if lines[place : place + 1] == [f"{header}\n"]:
        return text
    return "".join([*lines[:place], f"{header}\n", *lines[place:]])


def sources() -> list[Path]:
    """Returns the source files that Git tracks, or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCES]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def main(argv: list[str]) -> int:
    """Writes the headers that are missing, or names the files that lack one; 1 if there are any."""
    is_check = argv == ["--check"]
    if argv and not is_check:
        sys.stderr.write("licence_headers.py: the only flag is --check\n")
        return 2
    lacking = [
        path
        for path in sources()
        if with_header(path.read_text("utf-8"), path.suffix) != path.read_text("utf-8")
    ]
    for path in lacking:
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
        if not is_check:
            path.write_text(with_header(path.read_text("utf-8"), path.suffix), encoding="utf-8")
    return 1 if is_check and lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
