# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of flags and events from the code; `--check` names those that differ from it.

python docs/reference.py [--check]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_moevement.policy.accounting.event import PERIODIC
from megatron_moevement.policy.accounting.event_kinds import COMMON_FIELDS, EVENT_KINDS
from megatron_moevement.settings.flags import flag_name
from megatron_moevement.settings.parser import UserParser, meaning_and_default
from megatron_moevement.training.arguments import GROUPS, build_parser
from megatron_moevement.training.reporting.arguments import LoggingConfig

PAGES = Path(__file__).resolve().parent
OURS = ("--moevement-", "--inprocess-")
_FLAGS = """# Flags

The flags of `pretrain_moe.py` that Megatron-LM lacks, `--moevement-*`, and those for restarts in
place, `--inprocess-*`. `pretrain_moe.py --help` prints them with all others, and `--yaml-cfg FILE`
takes them, too; [megatron_scripts.md](megatron_scripts.md) has what became of Megatron-LM's flags.
`python docs/reference.py` writes this page from the code; a test compares them."""
_EVENTS = """# Events

With `--moevement-event-dir DIR` each process of a job writes a file of events there, one JSON
object a line; [account.md](account.md#what-it-is-made-from) has how many, and what becomes of old
ones. `moevement events --json` prints what is on this page for programs.
`python docs/reference.py` writes it from the code; a test compares them. Lines of the log, and exit
codes, are in the [runbook](runbook.md).

Names that end in `_s` are seconds, in `_bytes` bytes. Readers skip what they don't have."""


def flags_page() -> str:
    """Returns the page of the flags that Megatron-LM lacks, and of those for in-process restart."""
    parser = build_parser()
    lines = [_FLAGS]
    for title, group in (*GROUPS.values(), ("logging", LoggingConfig)):
        rows = list(_rows(parser, group))
        if rows:
            lines += ["", f"## {title.capitalize()}", ""]
            lines += ["| flag | value | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def _rows(parser: UserParser, group: type) -> Iterator[str]:
    actions = {action.dest: action for action in parser._actions}  # noqa: SLF001
    for field in dataclasses.fields(group):
        name, action = flag_name(field), actions[field.name]
        if not name.startswith(OURS):
            continue
        meaning, default = meaning_and_default(action)
        value = action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}"
        within = field.metadata["within"]
        cells = [
            f"`{name}`",
            "" if action.nargs == 0 else f"`{value}`" + (f" {within.words}" if within else ""),
            "" if default is None else f"`{default}`" if " " not in default else default,
            meaning,
        ]
        yield f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def events_page() -> str:
    """Returns the page of events and their fields."""
    lines = [
        _EVENTS,
        "",
        "## Every event",
        "",
        *_table(COMMON_FIELDS),
        "",
        "## Which there are",
        "",
    ]
    lines += ["| event | recorded by | meaning | what to do |", "|---|---|---|---|"]
    for name, kind in EVENT_KINDS.items():
        link = f"[`{name.value}`](#{name.value})"
        cells = (link, kind.recorder.value, kind.meaning, kind.action)
        lines.append(f"| {' | '.join(map(_escaped, cells))} |")
    for name, kind in EVENT_KINDS.items():
        recurs = "; it recurs, and of old ones only sums are kept" if name in PERIODIC else ""
        lines += ["", f"## `{name.value}`", ""]
        lines.append(f"{kind.recorder.value.capitalize()}: {kind.meaning}{recurs}.")
        lines += ["", *_table(kind.fields)] if kind.fields else []
    return "\n".join([*lines, ""])


def _table(fields: Mapping[str, str]) -> list[str]:
    rows = [f"| `{name}` | {_escaped(text)} |" for name, text in fields.items()]
    return ["| field | meaning |", "|---|---|", *rows]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


WRITTEN = {"use/flags.md": flags_page, "operate/events.md": events_page}


def main(argv: list[str]) -> int:
    """Writes the pages, or names those that the code would write otherwise; 1 if there are any."""
    is_check = argv == ["--check"]
    if argv and not is_check:
        sys.stderr.write("reference.py: the only flag is --check\n")
        return 2
    texts = {PAGES / name: text() for name, text in WRITTEN.items()}
    stale = [
        path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        sys.stdout.write(f"{path.relative_to(PAGES)}\n")
        if not is_check:
            path.write_text(texts[path], encoding="utf-8")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
