# SPDX-License-Identifier: Apache-2.0
"""`moevement operators`: prints what a job with given flags captures, and in which slot."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rich.table import Table

from megatron_moevement.cli.inputs import check_flags
from megatron_moevement.cli.launch import GRACE, PROGRAM, Job, launch
from megatron_moevement.cli.output import add_json_flag, document_alone, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.job.operators import OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.schedule_document import load_schedule

HELP = "print what a job captures of each operator, and when"
DESCRIPTION = """
Builds the model of a job from its flags, with its optimizer, on as many ranks as the job has, and
prints for one of them every operator with the bytes of its FULL and COMPUTE state and the slot in
which it is FULL. That is what the job captures: nothing is estimated. Where one machine is too
small for the ranks, start them as for training, with --moevement-operators FILE.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement operators`."""
    parser.usage = "moevement operators [-n N] [--rank RANK] [--json] -- FLAGS..."
    parser.add_argument("-n", "--ranks", type=int, default=1, help="ranks of the job (default: 1)")
    parser.add_argument(
        "--rank",
        metavar="RANK",
        help="such as pp0.dp0.tp0.cp0.ep0 (default: the one with the largest slot)",
    )
    add_json_flag(parser, "everything of all ranks; also an --inventory of moevement schedule")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="those of the job")


def run(args: argparse.Namespace) -> int:
    """Builds the model and prints; a failure of the ranks gives its own exit code."""
    if args.ranks < 1:
        args.parser.error("-n must be at least 1")
    check_flags(args.flags, args.ranks)
    with tempfile.TemporaryDirectory(prefix="moevement-operators-") as folder:
        file = Path(folder) / "operators.json"
        with document_alone(args):
            code = _build((*args.flags, f"--moevement-operators={file}"), args.ranks)
        if code != ExitCode.DONE:
            return code
        text = file.read_text()
    schedule = load_schedule(text, "the inventory of the ranks")
    rank = _rank(schedule, args.rank)
    title = (
        f"{rank}: {len(schedule.inventory.by_rank[rank])} operators, W = {schedule.window}, "
        f"digest {schedule.digest}"
    )
    tables = [_operator_table(schedule, rank), _slot_table(schedule, rank)]
    show(args, json.loads(text), [title, *tables])
    return ExitCode.DONE


def _build(flags: tuple[str, ...], ranks: int) -> int:
    if ranks > 1:
        name = "moevement operators"
        return launch(Job(ranks, 0, PROGRAM, flags, GRACE, log_directory=None, name=name)).code
    from megatron_moevement.training.program import main  # noqa: PLC0415  (imports much)

    return main(flags)


def _rank(schedule: WindowSchedule, name: str | None) -> LogicalRank:
    """Returns the rank of a name, or the one whose largest slot is largest."""
    ranks = schedule.inventory.ranks
    if name is None:
        return max(ranks, key=lambda rank: max(schedule.bytes_by_slot[rank]))
    found = next((rank for rank in ranks if str(rank) == name), None)
    if found is None:
        raise UserError(f"--rank {name}: the job has {', '.join(map(str, ranks))}")
    return found


def _operator_table(schedule: WindowSchedule, rank: LogicalRank) -> Table:
    """Returns one row for each operator, in the order of their slots."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("operator", "kind"):
        table.add_column(title, no_wrap=True)
    for title in ("FULL bytes", "COMPUTE bytes", "slot"):
        table.add_column(title, justify="right", no_wrap=True)
    operators = schedule.inventory.by_rank[rank]
    for each in sorted(operators, key=lambda each: (schedule.slots[each.id], each.id)):
        table.add_row(
            str(each.id),
            _KINDS[each.id.kind],
            f"{each.full_bytes:,}",
            f"{each.compute_bytes:,}",
            str(schedule.slots[each.id]),
        )
    return table


_KINDS = {
    OperatorKind.EXPERT: "expert",
    OperatorKind.GATE: "gate",
    OperatorKind.NON_EXPERT: "rest of a layer",
    OperatorKind.EMBEDDING: "embedding",
    OperatorKind.HEAD: "output head",
}


def _slot_table(schedule: WindowSchedule, rank: LogicalRank) -> Table:
    """Returns what each slot of a window holds on the rank: one iteration's capture."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("slot", "FULL bytes", "COMPUTE bytes", "captured bytes"):
        table.add_column(title, justify="right", no_wrap=True)
    operators = schedule.inventory.by_rank[rank]
    for slot, captured in enumerate(schedule.bytes_by_slot[rank]):
        full = sum(one.full_bytes for one in operators if one.id in schedule.full[slot])
        compute = sum(one.compute_bytes for one in operators if one.id in schedule.compute[slot])
        table.add_row(str(slot), f"{full:,}", f"{compute:,}", f"{captured:,}")
    return table
