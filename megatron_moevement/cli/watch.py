# SPDX-License-Identifier: Apache-2.0
"""`moevement watch`: a page in the terminal that shows how a run goes on, and renews itself."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_moevement.cli.inputs import DAMAGE, EVENT_DIR, damage_refused, event_folder
from megatron_moevement.cli.job_end import describe_status
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.cli.recoveries import recovery_document
from megatron_moevement.cli.status import latest_document
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.accounting.event import EventName, EventRecord
from megatron_moevement.policy.outcome.recoveries import EndedRecovery
from megatron_moevement.policy.report.newest import Newest, WatchedProcess, WatchedRestart
from megatron_moevement.runtime.observation.event_tail import EventTail
from megatron_moevement.runtime.observation.timestamp import timestamp

HELP = "watch a run in the terminal"
DESCRIPTION = """
Shows how far a run is, how protected, what each of its processes does, and its newest losses, from
its events; renews itself until Ctrl-C. A damaged event does not end it: it is left out, and a line
of the page has where it is. With --once or --json it is refused.
"""
_ROWS = 32
"""Of more processes only those are listed that do something else than most."""
_OLD_S = 10.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds its flags."""
    parser.add_argument("event_dirs", metavar="RUN_DIR", nargs="+", help=EVENT_DIR)
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="renew so often (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print it once, and end")
    add_json_flag(parser, "print once as JSON what the page is made of, and end")


def run(args: argparse.Namespace) -> int:
    """Shows the page until it is interrupted.

    Raises:
        UserError: a folder is missing, or holds no events where it is to be shown once; there is
            no terminal to show it in; an event is damaged where it is to be shown once.
    """
    if not args.every > 0:
        raise UserError(f"--every {args.every}: give a number of seconds above 0")
    tails, newest = Tails(args.event_dirs), Newest()
    if args.once or args.json:
        with damage_refused(*args.event_dirs):
            for name, record in tails.news():
                newest.take(name, record)
            found, shown_once = document(newest), page(newest, time.time())
        if not newest.processes:
            raise UserError(f"{', '.join(args.event_dirs)}: no events yet")
        show(args, found, [shown_once])
        return ExitCode.DONE
    if not sys.stdout.isatty():
        raise UserError("the page needs a terminal; --once prints it as it is now")
    with contextlib.suppress(KeyboardInterrupt):
        damage = Damage()
        for shown in _screen():
            take_news(tails.news(), newest, damage)
            shown.update(lasting_page(newest, time.time(), damage), refresh=True)
            time.sleep(args.every)
    return ExitCode.DONE


def page(newest: Newest, now_s: float) -> RenderableType:
    """Returns the page.

    Args:
        now_s: seconds since the epoch.
    """
    return Group(*(line for part in _parts(newest, now_s).values() for line in part()))


def document(newest: Newest) -> dict[str, Any]:
    """Returns what the page is made of; times of processes are seconds since the epoch."""
    return {
        "run_id": newest.run_id,
        **latest_document(newest.latest),
        "step_s": newest.duration_s,
        "loss": newest.step_fields.get("loss"),
        "grad_norm": newest.step_fields.get("grad_norm"),
        "processes": [{**dataclasses.asdict(one), "doing": _doing(one)} for one in newest.living()],
        "restarts": [_restart_document(one, newest) for one in newest.restarts],
    }


def _restart_document(watched: WatchedRestart, newest: Newest) -> dict[str, Any]:
    account, plan = watched.restart.account(), watched.restart.plan
    ended_s = min((one.time for one in watched.restart.recovered), default=0.0)
    return {
        "time": timestamp(watched.time_s),
        "generation": watched.generation,
        "lost": newest.loss_before(watched, describe_status),
        "plan": None if plan is None else dict(plan),
        "recovery": None if account is None else recovery_document(EndedRecovery(ended_s, account)),
    }


class Tails:
    """Reads the events of a run on and on, also where their folder is made later.

    Raises:
        UserError: what is given is no folder.
    """

    def __init__(self, event_dirs: Sequence[str]) -> None:
        """Has read nothing."""
        self._event_dirs = event_dirs
        self._tails: dict[Path, EventTail] = {}
        self._look()

    def news(self) -> Iterator[tuple[str, EventRecord]]:
        """Yields what was recorded since the last look, with the names of the files."""
        with contextlib.suppress(UserError):  # it may be gone for a moment
            self._look()
        for tail in self._tails.values():
            yield from tail.news()

    def _look(self) -> None:
        for folder in map(event_folder, self._event_dirs):
            self._tails.setdefault(folder, EventTail(folder))


@dataclasses.dataclass
class Damage:
    """How many events a page does without, and what is wrong with the newest of them."""

    count: int = 0
    newest: str = ""


def take_news(news: Iterable[tuple[str, EventRecord]], newest: Newest, damage: Damage) -> None:
    """Takes in what is new; what is damaged is counted and left out."""
    for name, record in news:
        try:
            newest.take(name, record)
        except DAMAGE as error:
            damage.count += 1
            damage.newest = f"{record.event.value} in {name}: {error!r}"


def lasting_page(newest: Newest, now_s: float, damage: Damage) -> RenderableType:
    """Returns the page while a job goes on, with a line for what damaged events keep from it.

    Args:
        now_s: seconds since the epoch.
    """
    lines: list[RenderableType] = []
    if damage.count:
        text = f"events that are damaged and left out: {damage.count}; the newest: {damage.newest}"
        lines.append(Text(text, style="bold red"))
    for name, part in _parts(newest, now_s).items():
        try:
            lines += part()
        except DAMAGE as error:
            text = f"{name}: not shown, an event is damaged: {error!r}"
            lines.append(Text(text, style="bold red"))
    return Group(*lines)


def _parts(newest: Newest, now_s: float) -> dict[str, Callable[[], Sequence[RenderableType]]]:
    """Returns what makes each part of the page, so that one can fail without the others."""
    return {
        "step": lambda: [_heading(newest, now_s)],
        "protection": lambda: [_protection(newest), Text()],
        "processes": lambda: [_processes(newest.living(), now_s), Text()],
        "losses": lambda: list(_losses(newest)),
    }


def _screen() -> Iterator[Live]:
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            yield live


def _heading(newest: Newest, now_s: float) -> Text:
    line = Text(f"run {newest.run_id or '?'}", style="bold")
    line.append(f"  step {newest.latest.step}", style="bold cyan")
    line.append(f"  generation {newest.latest.generation}")
    if newest.duration_s is not None:
        line.append(f"  {newest.duration_s:.3g} s a step")
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        value = newest.step_fields.get(name)
        if isinstance(value, float):
            line.append(f"  {title} {value:.4f}")
    silent_s = max(0.0, now_s - newest.time_s)
    style = "bold red" if silent_s > _OLD_S else "dim"
    return line.append(f"  newest event {_ago(silent_s)} ago", style=style)


def _protection(newest: Newest) -> Text:
    protection = newest.latest.events.get(EventName.PROTECTION)
    persisted = newest.latest.events.get(EventName.WINDOW_PERSISTED)
    if protection is None or persisted is None:
        return Text("protection: no window is persisted yet", style="yellow")
    level, window = protection.fields, persisted.fields
    last = int(window["start"]) + int(window["size"]) - 1
    spares = level["spares"]
    line = Text("protection: ")
    line.append(str(level["level"]), style="green" if level["level"] == "full" else "bold yellow")
    line.append(f", {window['copies']} of {level['wanted']} copies")
    line.append("" if spares is None else f", {spares} spares left")
    line.append(f"; window {window['start']} to {last}, lag {window['lag']}")
    return line.append("".join(f"; {cost}" for cost in level["costs"]))


def _processes(found: list[WatchedProcess], now_s: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("rank", "process", "host", "does", "step", "host memory", "last event"):
        table.add_column(title, justify="left" if title in {"host", "does"} else "right")
    listed, doings = found, Counter(_doing(one) for one in found)
    if len(found) > _ROWS:
        ((most, count),) = doings.most_common(1)
        listed = [one for one in found if _doing(one) != most][:_ROWS]
        table.add_row("", "", "", f"{count} processes: {most}", "", "", "")
    for one in listed:
        doing = _doing(one)
        style = "bold red" if one.code not in {None, 0} else "yellow" if doing != "training" else ""
        table.add_row(
            "spare" if one.rank < 0 else str(one.rank),
            "" if one.number is None else str(one.number),
            Text(str(one.host or "")),
            Text(doing),
            str(one.step) if one.step else "",
            f"{one.host_bytes / 1e9:.2f} GB" if one.host_bytes else "",
            _ago(max(0.0, now_s - one.time_s)),
            style=style,
        )
    return table


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else str(timedelta(seconds=round(seconds)))


def _doing(one: WatchedProcess) -> str:
    return one.doing if one.code is None else describe_status(one.code)


def _losses(newest: Newest) -> Iterator[Text]:
    """Yields a line for each of the newest restarts."""
    for watched in newest.restarts:
        account = watched.restart.account()
        at = datetime.fromtimestamp(watched.time_s).astimezone().strftime("%H:%M:%S")
        lost = newest.loss_before(watched, describe_status)
        if account is None:
            plan = watched.restart.plan
            doing = "no plan yet" if plan is None else f"{plan['verdict']}: {plan['reason']}"
            yield Text(f"{at}  {lost}; {doing}", style="bold red")
            continue
        proof = "the same bits" if account.verified else "BITS DIFFER"
        yield Text(
            f"{at}  {lost}; {account.verdict.value}, {account.duration_s:.1f} s, {proof}",
            style="" if account.verified else "bold red",
        )
