# SPDX-License-Identifier: Apache-2.0
"""`moevement status`: how far a job is, and how protected, from what its processes publish."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.cli.inputs import EVENT_DIR, add_store_dir, damage_refused, event_folder
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.cli.recoveries import (
    OF_RECOVERIES,
    fault_line,
    open_fault,
    recovery_document,
    recovery_line,
)
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.outcome.latest import Latest
from megatron_moevement.policy.outcome.recoveries import ended_recoveries
from megatron_moevement.runtime.observation.events import EventName, EventRecord, histories_in
from megatron_moevement.runtime.observation.timestamp import timestamp
from megatron_moevement.runtime.stores.status_file import read_status
from megatron_moevement.runtime.stores.store import LOCK_NAME, process_folders
from megatron_moevement.runtime.stores.store_listing import run_folders
from megatron_moevement.runtime.stores.store_lock import lock_owner

HELP = "show how protected a running job is"
DESCRIPTION = """
Prints step, newest persisted window, copies, spares, what a single loss would cost, and the newest
recovery. Without EVENT_DIR it looks at the runs that keep something in the memory of this machine;
recoveries are in events alone.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement status`."""
    parser.add_argument("event_dir", metavar="EVENT_DIR", nargs="?", help=EVENT_DIR)
    parser.add_argument("--run-id", metavar="ID", help="of this run alone")
    add_store_dir(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Looks and prints.

    Raises:
        UserError: there is no such folder or run, or an event is damaged.
    """
    if args.event_dir is not None:
        if args.run_id is not None:
            raise UserError("give EVENT_DIR or --run-id: events are those of one run")
        with damage_refused(args.event_dir):
            document, lines = _of_events(args.event_dir)
    else:
        document, lines = _of_stores(args.store_dir, args.run_id)
    show(args, document, lines)
    return ExitCode.DONE


def _of_stores(store_dir: Path, run_id: str | None) -> tuple[dict[str, Any], list[str]]:
    """Returns a document and a line for each run; who has the first rank publishes its status."""
    document: dict[str, Any] = {}
    lines = []
    for folder in run_folders(store_dir):
        if run_id not in {None, folder.name}:
            continue
        processes = process_folders(folder)
        owners = {number: lock_owner(process / LOCK_NAME) for number, process in processes.items()}
        live = sum(owner is not None for owner in owners.values())
        found = [read_status(process) for process in processes.values()]
        known = max((one for one in found if one), key=lambda one: float(one["time"]), default=None)
        document[folder.name] = {
            "live_processes": live,
            "processes": len(processes),
            "published": known,
        }
        on = f"run {folder.name}: {live} of {len(processes)} processes of this machine live"
        if known is None:
            lines.append(f"{on}, no window is persisted yet or rank 0 is on another machine")
            continue
        lines.append(
            f"{on}, generation {known['generation']}, step {known['step']} "
            f"{_ago(float(known['time']))}, window {_window(known)}; {known['line']}"
        )
    if not lines:
        which = "" if run_id is None else f" of run {run_id}"
        raise UserError(
            f"nothing{which} in {store_dir}: give the job's --moevement-store-dir as --store-dir, "
            "or its --moevement-event-dir"
        )
    return document, lines


def _of_events(event_dir: str) -> tuple[dict[str, Any], list[str]]:
    latest, of_recoveries = Latest(), list[EventRecord]()
    for name, read in histories_in(event_folder(event_dir)).items():
        for one in read():
            latest.take(one, name)
            if one.event in OF_RECOVERIES:
                of_recoveries.append(one)
    if latest.time_s is None:
        raise UserError(f"{event_dir} has no events of ranks yet")
    lines = [f"generation {latest.generation}, step {latest.step} {_ago(latest.time_s)}"]
    last = latest.events.get(EventName.PROTECTION)
    window = latest.events.get(EventName.WINDOW_PERSISTED)
    recoveries, recovery_lines = _newest_recovery(of_recoveries)
    document = {**latest_document(latest), **recoveries}
    if last is None or window is None:
        lines.append("protection: no window is persisted yet")
    else:
        lines[0] += f", window {_window(window.fields)}"
        lines.append(_protection(last.fields, window.fields))
    return document, lines + recovery_lines


def latest_document(latest: Latest) -> dict[str, Any]:
    """Returns how far a job is, and how protected, for programs."""
    last = latest.events.get(EventName.PROTECTION)
    window = latest.events.get(EventName.WINDOW_PERSISTED)
    return {
        "generation": latest.generation,
        "step": latest.step,
        "time": latest.time_s,
        "protection": None if last is None else dict(last.fields),
        "window": None if window is None else dict(window.fields),
    }


def _protection(level: Mapping[str, Any], window: Mapping[str, Any]) -> str:
    told = f"protection: {level['level']}, {window['copies']} of {level['wanted']} copies"
    spares = level["spares"]
    told += "" if spares is None else f", spares left: {spares}"
    return "; ".join([told, *level["costs"]])


def _newest_recovery(events: Iterable[EventRecord]) -> tuple[dict[str, Any], list[str]]:
    """Returns the newest recovery, and a fault after it, for the document and in lines."""
    ordered = sorted(events, key=lambda one: one.time)
    ended, fault = ended_recoveries(ordered), open_fault(ordered)
    document = {
        "recovery": recovery_document(ended[-1]) if ended else None,
        "open_fault": None if fault is None else timestamp(fault.time),
    }
    lines = [f"newest recovery: {recovery_line(ended[-1])}"] if ended else []
    return document, lines if fault is None else [*lines, fault_line(fault)]


def _window(told: Mapping[str, Any]) -> str:
    last = int(told["start"]) + int(told["size"]) - 1
    return f"{told['start']} to {last} persisted with a lag of {told['lag']}"


def _ago(then_s: float) -> str:
    return f"({max(0.0, time.time() - then_s):.0f} s ago)"
