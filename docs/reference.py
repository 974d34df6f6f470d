# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of flags and events from the code; `--check` names those that differ from it.

python docs/reference.py [--check]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from megatron_moevement.policy.accounting.event import PERIODIC
from megatron_moevement.policy.accounting.event_kinds import COMMON_FIELDS, EVENT_KINDS
from megatron_moevement.settings.flags import flag_name
from megatron_moevement.settings.parser import UserParser, meaning_and_default
from megatron_moevement.training.arguments import FLAG_GROUPS, build_parser
from megatron_moevement.training.megatron_flags import FEATURES
from megatron_moevement.training.refusals import answer, resolve

PAGES = Path(__file__).resolve().parent
MEGATRON_LM = PAGES.parent / "tests" / "training" / "megatron_lm_flags.txt"
"""Every flag of Megatron-LM core_v0.16.1."""
OURS = ("--moevement-", "--inprocess-")
_FLAGS = """# Flags

The flags of `pretrain_moe.py` that Megatron-LM lacks, `--moevement-*`, and those for restarts in
place, `--inprocess-*`. `pretrain_moe.py --help` prints them with all others, and `--yaml-cfg FILE`
takes them, too; [megatron_scripts.md](megatron_scripts.md) has what became of Megatron-LM's flags.
`python docs/reference.py` writes this page from the code; a test compares them."""
_MEGATRON_FLAGS = """# Flags of Megatron-LM

What becomes of each flag of Megatron-LM core_v0.16.1. The first tables have those that are settings
of `pretrain_moe.py` and have an effect, under the titles of `pretrain_moe.py --help`; then come
[all others](#all-others). [flags.md](flags.md) has `--inprocess-*` and what Megatron-LM lacks,
[megatron_scripts.md](megatron_scripts.md) what launch scripts come to; `--yaml-cfg FILE` takes all.
`python docs/reference.py` writes this page from the code; a test compares them."""
_OTHER_FLAGS = """## All others

A value in the second column is accepted, for it is the case anyway (`given`: the flag without a
value). With another value the third column holds. What is refused ends the program with exit code 2
and one line that has all of it by feature."""
_REFUSED_VALUES = """## Values that are refused

Of settings above, these values ask for a feature that is not covered."""
_EVENTS = """# Events

With `--moevement-event-dir DIR` each process of a job writes a file of events there, one JSON
object a line; [account.md](account.md#what-it-is-made-from) has how many, and what becomes of old
ones. `moevement events --json` prints what is on this page for programs.
`python docs/reference.py` writes it from the code; a test compares them. Lines of the log, and exit
codes, are in the [runbook](runbook.md).

Names that end in `_s` are seconds, in `_bytes` bytes. Readers skip what they don't have."""


def flags_page() -> str:
    """Returns the page of the flags that Megatron-LM lacks, and of those for in-process restart."""
    return "\n".join([_FLAGS, *_settings(build_parser(), are_ours=True), ""])


def _settings(parser: UserParser, *, are_ours: bool) -> Iterator[str]:
    """Yields a table for each group of flags that has some of ours, or of Megatron-LM's."""
    for title, group in FLAG_GROUPS:
        rows = list(_rows(parser, group, are_ours=are_ours))
        if rows:
            yield from ("", f"## {title[0].upper()}{title[1:]}", "")
            yield from ("| flag | value | default | meaning |", "|---|---|---|---|", *rows)


def _rows(parser: UserParser, group: type, *, are_ours: bool) -> Iterator[str]:
    actions = {action.dest: action for action in parser._actions}  # noqa: SLF001
    for field in dataclasses.fields(group):
        name, action = flag_name(field), actions[field.name]
        if name.startswith(OURS) is not are_ours:
            continue
        meaning, default = meaning_and_default(action)
        choices = "{" + ",".join(map(str, action.choices or ())) + "}"
        value = action.metavar or (choices if action.choices else action.dest.upper())
        within = field.metadata["within"]
        cells = [
            f"`{name}`",
            "" if action.nargs == 0 else f"`{value}`" + (f" {within.words}" if within else ""),
            "" if default is None else f"`{default}`" if " " not in default else default,
            meaning,
        ]
        yield f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def megatron_flags_page() -> str:
    """Returns the page of Megatron-LM's flags: the settings, and what becomes of the others."""
    parser = build_parser()
    names = MEGATRON_LM.read_text(encoding="utf-8").split()
    others = [name for name in names if name not in parser.flags]
    lines = [_MEGATRON_FLAGS, *_settings(parser, are_ours=False), "", _OTHER_FLAGS, ""]
    lines += ["| flag | is the case | what becomes of it |", "|---|---|---|"]
    lines += [_other_flag(name, parser.flags) for name in others]
    lines += ["", _REFUSED_VALUES, "", "| flag | values | feature | why |", "|---|---|---|---|"]
    lines += [
        f"| `{flag}` | {_code(values.split())} | {name} | {_escaped(feature.reason)} |"
        for name, feature in FEATURES.items()
        for flag, values in feature.values.items()
    ]
    return "\n".join([*lines, ""])


def _other_flag(name: str, settings: Collection[str]) -> str:
    """Returns the row of a flag that is no setting under this name."""
    words = resolve([name], settings).rest
    if words and words != (name,):
        return f"| `{name}` |  | is taken as `{' '.join(words)}` |"
    found = answer(name)
    assert found is not None, name
    is_the_case = _code(value or "given" for value in found.as_it_is)
    if not found.has_effect:
        outcome = "has no effect; named once at start"
    elif found.feature is None:
        outcome = "accepted as it is the case; another value is refused as unknown"
    elif found.only_tunes:
        outcome = f"has no effect, named once at start; refused where *{found.feature}* is"
    else:
        reason = _escaped(FEATURES[found.feature].reason)
        outcome = f"refused as *{found.feature}*: {reason}"
    return f"| `{name}` | {is_the_case} | {outcome} |"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in dict.fromkeys(words))


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


WRITTEN = {
    "use/flags.md": flags_page,
    "use/megatron_flags.md": megatron_flags_page,
    "operate/events.md": events_page,
}


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
