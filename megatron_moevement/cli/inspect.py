# SPDX-License-Identifier: Apache-2.0
"""`moevement inspect`: shows the windows, slots, holders and checksums in host memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from megatron_moevement.cli.inputs import add_store_dir
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.stores.store import RingRole, default_store_dir
from megatron_moevement.runtime.stores.store_listing import (
    SurveyedJournal,
    SurveyedProcess,
    SurveyedRing,
    SurveyedRun,
    SurveyedSlot,
    survey,
)

HELP = "show what runs keep in host memory"
DESCRIPTION = """
Shows what the runs on this machine keep in host memory, those that are training included: for each
process its place in the run, and for each slot who holds it and whether its checksums are right.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement inspect`."""
    add_store_dir(parser)
    parser.add_argument(
        "--summary", action="store_true", help="a line for each run, and no checksum is compared"
    )
    add_json_flag(parser, "everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Looks, compares and prints.

    Raises:
        UserError: there is no such folder; a user who never ran a job has no default one yet.
    """
    if not args.store_dir.exists() and args.store_dir != default_store_dir():
        raise UserError(
            f"--store-dir {args.store_dir} is not there; give the run's --moevement-store-dir"
        )
    runs = survey(args.store_dir, compared=not args.summary)
    shown: list[RenderableType] = [] if runs else [f"nothing in {args.store_dir}"]
    for each in runs:
        if args.summary:
            shown.append(_summary(each))
            continue
        shown += [_title(each), _process_table(each), _slot_table(each), *_troubles(each)]
    told = _summary_document if args.summary else _run_document
    document = {"store_dir": str(args.store_dir), "runs": [told(run) for run in runs]}
    show(args, document, shown)
    return ExitCode.DONE


def _title(run: SurveyedRun) -> str:
    total_bytes = sum(process.size_bytes for process in run.processes)
    identity = run.identity
    told = "" if identity is None else f", layout {identity.fingerprint}"
    return f"run {run.run_id}: {len(run.processes)} processes, {decimal(total_bytes)}{told}"


def _summary(run: SurveyedRun) -> str:
    found = _summary_document(run)
    steps, persisted = found["committed"], found["persisted"]
    parts = [f"{found['used']} of them in use"]
    parts.append(f"step {_range(steps)} committed" if steps else "no step is committed")
    parts.append(f"windows up to step {_range(persisted)} persisted" if persisted else "no window")
    parts.append(f"{found['slots']} slots")
    if found["troubles"]:
        parts.append(f"{found['troubles']} files unreadable")
    return ", ".join([_title(run), *parts])


def _range(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(set(steps)) == 1 else f"{steps[0]} to {steps[-1]}"


def _summary_document(run: SurveyedRun) -> dict[str, Any]:
    states = [one.journal.state for one in run.processes if one.journal and one.journal.state]
    committed = sorted(state.committed for state in states if state.rank)
    persisted = sorted(state.persisted.last for state in states if state.persisted)
    return {
        "run_id": run.run_id,
        "processes": len(run.processes),
        "used": sum(one.locked_by is not None for one in run.processes),
        "bytes": sum(one.size_bytes for one in run.processes),
        "committed": [committed[0], committed[-1]] if committed else None,
        "persisted": [persisted[0], persisted[-1]] if persisted else None,
        "slots": sum(len(ring.slots) for one in run.processes for ring in one.rings),
        "troubles": len(_troubles(run)),
    }


def _process_table(run: SurveyedRun) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("process", justify="right", no_wrap=True)
    table.add_column("used by", no_wrap=True)
    for title in ("rank", "committed", "persisted", "ledger"):
        table.add_column(title, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for process in run.processes:
        state = process.journal and process.journal.state
        entries = process.journal.entries if process.journal else range(0)
        rank, committed, persisted = "-", "-", "-"
        if state:
            rank = str(state.rank) if state.rank else "spare"
            committed = str(state.committed)
            persisted = _window(state.persisted) if state.persisted else "-"
        table.add_row(
            str(process.process),
            _user(process),
            rank,
            committed,
            persisted,
            f"{entries[0]} to {entries[-1]}" if entries else "-",
            decimal(process.size_bytes),
        )
    return table


def _user(process: SurveyedProcess) -> str:
    if process.locked_by is None:
        return "nobody"
    return f"pid {process.locked_by.get('pid', '?')}"


def _window(window: Window) -> str:
    return f"{window.start} to {window.last}, epoch {window.schedule_version}"


def _slot_table(run: SurveyedRun) -> Table:
    """Returns one row for each slot that anybody holds."""
    holders: dict[SlotKey, list[tuple[SurveyedProcess, SurveyedRing, SurveyedSlot]]] = {}
    for process in run.processes:
        for ring in process.rings:
            for slot in ring.slots:
                key = SlotKey(ring.owner, slot.record.window, slot.record.slot)
                holders.setdefault(key, []).append((process, ring, slot))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("slot of", "window"):
        table.add_column(title, overflow="fold")
    for title in ("slot", "step", "bytes"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("held by", "checksums"):
        table.add_column(title, overflow="fold")
    for key, copies in sorted(holders.items(), key=lambda item: item[0]):
        damaged = [
            f"p{process.process}: {', '.join(slot.damaged)} damaged"
            for process, _, slot in copies
            if slot.damaged
        ]
        table.add_row(
            str(key.owner),
            _window(key.window),
            str(key.slot),
            str(key.step),
            decimal(copies[0][2].record.payload_bytes),
            ", ".join(_holder(process, ring) for process, ring, _ in copies),
            "; ".join(damaged) or "ok",
        )
    return table


def _holder(process: SurveyedProcess, ring: SurveyedRing) -> str:
    return f"p{process.process}" + (" (own)" if ring.role is RingRole.OWN else "")


def _troubles(run: SurveyedRun) -> list[str]:
    files = [file for process in run.processes for file in (process.journal, *process.rings)]
    return [file.trouble for file in files if file is not None and file.trouble]


def _run_document(run: SurveyedRun) -> dict[str, Any]:
    identity = run.identity
    return {
        "run_id": run.run_id,
        "fingerprint": identity and identity.fingerprint,
        "format_version": identity and identity.format_version,
        "processes": [
            {
                "process": process.process,
                "folder": str(process.folder),
                "locked_by": process.locked_by,
                "bytes": process.size_bytes,
                "journal": process.journal and _journal_document(process.journal),
                "rings": [_ring_document(ring) for ring in process.rings],
            }
            for process in run.processes
        ],
    }


def _journal_document(journal: SurveyedJournal) -> dict[str, Any]:
    entries = journal.entries
    return {
        "state": journal.state and journal.state.document(),
        "ledger": [entries[0], entries[-1]] if entries else None,
        "losses": journal.losses,
        "trouble": journal.trouble,
    }


def _ring_document(ring: SurveyedRing) -> dict[str, Any]:
    return {
        "path": str(ring.path),
        "role": ring.role.value,
        "owner": str(ring.owner),
        "bytes": ring.size_bytes,
        "capacity": ring.capacity,
        "room_bytes": ring.room_bytes,
        "trouble": ring.trouble,
        "slots": [_slot_document(slot) for slot in ring.slots],
    }


def _slot_document(slot: SurveyedSlot) -> dict[str, Any]:
    record = slot.record
    return {
        "era": record.rollbacks,
        "window": record.window.document,
        "slot": record.slot,
        "step": record.step,
        "bytes": record.payload_bytes,
        "file_offset": slot.payload_offset,
        "damaged": list(slot.damaged),
        "parts": [
            {
                "name": part.name,
                "file_offset": slot.payload_offset + part.offset,
                "bytes": part.size_bytes,
                "checksum": f"{part.checksum:016x}",
            }
            for part in record.parts
        ],
    }
