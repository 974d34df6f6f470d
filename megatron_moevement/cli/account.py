# SPDX-License-Identifier: Apache-2.0
"""`moevement account`: what every second of every process of a job was."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table

from megatron_moevement.cli.inputs import EVENT_DIR, damage_refused, event_folder
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.accounting.account import JobAccount, account_of
from megatron_moevement.policy.accounting.parts import Part
from megatron_moevement.runtime.observation.events import histories_in
from megatron_moevement.runtime.observation.timestamp import timestamp

HELP = "show what every second of a job was"
DESCRIPTION = """
Prints how long each part of a job took, by process, from its events: useful steps, what was lost,
the parts of recoveries, saves, time between launches. The parts of a process add up to the time
from the start of the first launch to the end of the last one. Give several folders where each
launch has one of its own.
"""
_SECOND = 1e6
_MOST_COLUMNS = 5
"""Of processes: more do not fit on a screen of 80 characters."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds its flags."""
    parser.add_argument("event_dirs", metavar="RUN_DIR", nargs="+", help=EVENT_DIR)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the account.

    Raises:
        UserError: a folder is missing, or there is no event in any.
    """
    histories = {}
    for event_dir in args.event_dirs:
        histories.update(histories_in(event_folder(event_dir)))
    with damage_refused(*args.event_dirs):
        account = account_of(histories)
    if account is None:
        raise UserError(f"{', '.join(args.event_dirs)}: no events yet")
    show(args, account.document(), [_table(account), *_lines(account)])
    return ExitCode.DONE


def _table(account: JobAccount) -> Table:
    """Returns a row for each part, and a column for each process, or for the least and the most."""
    number = len(account.processes)
    names = [f"p{one.process}" for one in account.processes]
    if number > _MOST_COLUMNS:
        names = [f"least of {number}", f"most of {number}"]
    table = Table("part (s)", *names, "all", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    every_us = account.parts_us
    whole_us = sum(every_us.values())
    for part in Part:
        if part not in every_us:
            continue
        own = _columns([one.parts_us.get(part, 0) for one in account.processes])
        (every,) = _columns([every_us[part]])
        table.add_row(part.value, *own, every, _share(every_us[part], whole_us))
    own = _columns([sum(one.parts_us.values()) for one in account.processes])
    table.add_section()
    table.add_row("sum", *own, *_columns([whole_us]), "100.0 %")
    return table


def _columns(times_us: Sequence[int]) -> list[str]:
    """Returns a text for each time, or for the least and the most of many; nothing for none."""
    if len(times_us) > _MOST_COLUMNS:
        times_us = [min(times_us), max(times_us)]
    return [f"{time_us / _SECOND:.2f}" if time_us else "" for time_us in times_us]


def _share(part_us: int, whole_us: int) -> str:
    return f"{100 * part_us / whole_us:.1f} %"


def _lines(account: JobAccount) -> list[str]:
    launches = "1 launch" if account.launches == 1 else f"{account.launches} launches"
    ranks = "1 rank" if account.ranks == 1 else f"{account.ranks} ranks"
    lines = [
        f"{launches} from {timestamp(account.begun_us / _SECOND)} on, "
        f"{account.wall_us / _SECOND:.1f} s; {account.steps} steps on {ranks}",
        f"effective training time ratio {account.effective_training_time_ratio:.3f}, "
        f"goodput {account.goodput_steps_per_s:.3f} steps/s",
    ]
    between_s, recover_s = account.time_between_failures_s, account.time_to_recover_s
    if account.was_lost:
        lines.append("the newest launch ended because processes were lost")
    if between_s is None:
        lines.append("no fault was noticed")
    else:
        faults = "1 fault" if account.faults == 1 else f"{account.faults} faults"
        none = "training has gone on after none"
        repair = none if recover_s is None else f"{recover_s:.1f} s to recover"
        lines.append(f"{faults}: as seen, {between_s:.1f} s between failures, {repair}")
    for outage in account.outages:
        begun = timestamp(outage.start_us / _SECOND)
        place = f"{begun} outage before generation {outage.generation} of launch {outage.launch}"
        if outage.end_us is None:
            lines.append(f"{place}: it has not ended")
        else:
            lines.append(f"{place}: {(outage.end_us - outage.start_us) / _SECOND:.1f} s")
    return lines
