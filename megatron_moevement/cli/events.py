# SPDX-License-Identifier: Apache-2.0
"""`moevement events`: what the events of a job are, what to do about each, and their fields."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from rich.table import Table

from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.accounting.event_kinds import COMMON_FIELDS, EVENT_KINDS

HELP = "show what is recorded in --moevement-event-dir, with all fields"
DESCRIPTION = """
Lists the events that processes record in the folder of --moevement-event-dir, which process records
each, what is to be done about it, and the meaning of every field. It reads no folder.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement events`."""
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a table of events and fields."""
    document = {
        name.value: {
            "recorder": kind.recorder.value,
            "meaning": kind.meaning,
            "action": kind.action,
            "fields": {**COMMON_FIELDS, **kind.fields},
        }
        for name, kind in EVENT_KINDS.items()
    }
    table = Table("event", "field", "meaning")
    _add(table, "(each)", "", COMMON_FIELDS)
    for name, kind in EVENT_KINDS.items():
        text = f"{kind.recorder.value}: {kind.meaning}\nto do: {kind.action}"
        _add(table, name.value, text, kind.fields)
    show(args, document, [table])
    return ExitCode.DONE


def _add(table: Table, name: str, meaning: str, fields: Mapping[str, str]) -> None:
    table.add_section()
    table.add_row(name, "", meaning)
    for field, text in fields.items():
        table.add_row("", field, text)
