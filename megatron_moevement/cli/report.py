# SPDX-License-Identifier: Apache-2.0
"""`moevement report`: a page of what happened in a run: outages, timeline, curves, what it cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_moevement.cli.inputs import EVENT_DIR, damage_refused, event_folder, read_text
from megatron_moevement.cli.job_end import describe_status
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.cli.report_page import page_of, write_page
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.facts.facts_document import FACTS, load_facts
from megatron_moevement.policy.report.run_report import report_of
from megatron_moevement.runtime.observation.events import histories_in, kept_documents

HELP = "make a page of what happened in a run"
DESCRIPTION = """
Makes one HTML file from the events of a run, which opens in any browser without a network: which
process was lost and on which host, what each outage cost and what was done about it, what each
moment of each process was, losses, protection, host memory. Give several folders where each launch
has one of its own.
"""
PAGE = "report.html"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds its flags."""
    parser.add_argument("event_dirs", metavar="RUN_DIR", nargs="+", help=EVENT_DIR)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the page (default: {PAGE} in the last RUN_DIR)"
    )
    add_json_flag(parser, "print what the page shows as JSON, and write no page")


def run(args: argparse.Namespace) -> int:
    """Writes the page.

    Raises:
        UserError: a folder is missing, there is no event in any, or the page can't be written.
    """
    report = report_in(args.event_dirs)
    if args.json:
        show(args, report, [])
        return ExitCode.DONE
    path = args.out or Path(args.event_dirs[-1]) / PAGE
    write_page(page_of(report), path)
    show(args, None, [f"{path}: {_summary(report)}"])
    return ExitCode.DONE


def report_in(event_dirs: list[str]) -> dict[str, Any]:
    """Returns the report of a run, from the folders of its events.

    Raises:
        UserError: a folder is missing, or there is no event in any, or one is damaged.
    """
    histories = {}
    folders = [event_folder(each) for each in event_dirs]
    for folder in folders:
        histories.update(histories_in(folder))
    with damage_refused(*event_dirs):
        report = report_of(histories, _facts_in(folders), describe_status)
    if report is None:
        raise UserError(
            f"{', '.join(event_dirs)}: no events yet; give the run's --moevement-event-dir"
        )
    return report


def _facts_in(folders: list[Path]) -> Iterator[tuple[int, Facts]]:
    """Yields the facts of recoveries with their times, in microseconds since the epoch."""
    files = [file for folder in folders for file in kept_documents(folder, FACTS)]
    for file in sorted(files, key=lambda file: file.name):
        at_ns = int(file.name.partition("-")[0])
        yield at_ns // 1000, load_facts(read_text(file), str(file))


def _summary(report: dict[str, Any]) -> str:
    outages = report["incidents"]
    counted = "1 outage" if len(outages) == 1 else f"{len(outages)} outages"
    ratio = report["account"]["effective_training_time_ratio"]
    lost = [one["line"] for one in report["ending"]["casualties"]]
    lost += [one["summary"] for one in reversed(outages) if one["summary"]]
    newest = f"; the newest loss: {lost[0]}" if lost else ""
    return f"{counted}, effective training time ratio {ratio:.3f}{newest}"
