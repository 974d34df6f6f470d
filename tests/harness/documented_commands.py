# SPDX-License-Identifier: Apache-2.0
"""The commands in blocks of code of the pages, as a reader would type them."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "$ "
_PROGRAM = re.compile(
    r"(?:[A-Z_]+=(?:'[^']*'|\S*) )*(?:\./scripts/|\.venv/bin/|/tmp/fresh/bin/)?"
    r"(?:[\w./-]+\.sh|bash|cd|curl|docker|fork|git|kubectl|mkdocs|moevement|pip|pytest|python|sbatch"
    r"|torchrun|torchx)(?: |$)"
    r"|stdlib=\$"
)
"""How a command begins: with variables, and a program that the pages use."""


class StrayLineError(Exception):
    """A line among commands is none, or a block that is none of commands begins like one."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: from the root of the repository.
        text: in one line, without its comment.
    """

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(page: Path) -> list[Command]:
    """Returns the commands of a page, in their order.

    Raises:
        StrayLineError: a line can't be told from a command.
    """
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    blocks = _blocks(page.read_text(encoding="utf-8").splitlines())
    return [Command(name, text) for block in blocks for text in _commands_in(block, name)]


def spans_of(page: Path) -> list[Command]:
    """Returns the commands in the text of a page, between backticks, with at least one argument."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    lines = page.read_text(encoding="utf-8").splitlines()
    in_blocks = {line for block in _blocks(lines) for line in block}
    text = "\n".join(line for line in lines if line.strip() not in in_blocks)
    spans = (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))
    return [Command(name, span) for span in spans if _PROGRAM.match(span) and " " in span]


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yields the lines of each block of code, between fences or indented after a blank line."""
    block: list[str] = []
    is_fenced, may_begin = False, True
    for line in [*lines, "end"]:
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
            if block and not is_fenced:
                yield block
                block = []
        elif is_fenced or (line.startswith("    ") and (block or may_begin)):
            block.append(line.strip())
        elif block:
            yield block
            block = []
        may_begin = not line.strip()


def _commands_in(block: list[str], page: str) -> Iterator[str]:
    lines = [_without_comment(line) for line in "\n".join(block).replace("\\\n", "").splitlines()]
    lines = [line for line in lines if line]
    if any(line.startswith(PROMPT) for line in lines):
        yield from (line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT))
    elif lines and _PROGRAM.match(lines[0]):
        for line in lines:
            if not _PROGRAM.match(line):
                raise StrayLineError(f"{page}: a line between commands is none: {line}")
            yield line
    elif lines and _can_be_started(lines[0].split()[0]):
        raise StrayLineError(f"{page}: a command of a program that no page has used: {lines[0]}")


def _without_comment(line: str) -> str:
    return " ".join(re.sub(r"(?:^|\s+)# .*$", "", line).split())


def _can_be_started(word: str) -> bool:
    return shutil.which(word) is not None or (ROOT / word).is_file()
