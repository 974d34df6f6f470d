# SPDX-License-Identifier: Apache-2.0
"""`moevement recoveries`: what each recovery of a run came down to, and how long it took."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megatron_moevement.cli.inputs import EVENT_DIR, damage_refused, events_in
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.outcome.recoveries import EndedRecovery, ended_recoveries
from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.runtime.observation.events import EventName, EventRecord
from megatron_moevement.runtime.observation.timestamp import timestamp

HELP = "show the recoveries of a run"
DESCRIPTION = """
Prints one line for each recovery of a run, from its events, with the time at which it ended, and
one if a fault was noticed after which no recovery has ended.
"""
OF_RECOVERIES = frozenset({EventName.FAULT_DETECTED, EventName.RECOVERED})
"""Events that recoveries are made from."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds its flags."""
    parser.add_argument("event_dir", metavar="DIR", help=EVENT_DIR)
    add_json_flag(parser)
    parser.add_argument(
        "--require",
        metavar="VERDICT",
        choices=[verdict.value for verdict in Verdict],
        help="fail unless there were recoveries, each with this verdict and with no replay that "
        "differed from the first time",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the recoveries; judges them if asked to."""
    with damage_refused(args.event_dir):
        events = events_in(args.event_dir, lambda one: one.event in OF_RECOVERIES)
        ended = ended_recoveries(events)
        lines = [recovery_line(each) for each in ended]
    recoveries = [each.account for each in ended]
    fault = open_fault(events)
    if fault is not None:
        lines.append(fault_line(fault))
    document = {
        "recoveries": [recovery_document(each) for each in ended],
        "open_fault": None if fault is None else timestamp(fault.time),
    }
    nothing = f"no recovery in {args.event_dir}: no process met others again after a fault"
    show(args, document, lines or [nothing])
    if args.require is None:
        return ExitCode.DONE
    wanted = Verdict(args.require)
    if not recoveries:
        print(f"no recovery, {wanted.value} is required", file=sys.stderr)
    wrong = [each for each in recoveries if each.verdict is not wanted or not each.verified]
    for each in wrong:
        print(
            f"generation {each.generation}: {wanted.value} with the same bits is required",
            file=sys.stderr,
        )
    return ExitCode.FAILURE if wrong or not recoveries else ExitCode.DONE


def recovery_line(ended: EndedRecovery) -> str:
    """Returns a recovery for people, with the time at which it ended."""
    return f"{timestamp(ended.time_s)} {ended.account.line}"


def fault_line(fault: EventRecord) -> str:
    """Returns a fault after which no recovery has ended, for people."""
    return (
        f"{timestamp(fault.time)} generation {fault.generation}: a fault was noticed, and no "
        "recovery has ended since"
    )


def open_fault(events: Sequence[EventRecord]) -> EventRecord | None:
    """Returns the first sign of a fault after the newest recovery, if there is one."""
    last = max((one.time for one in events if one.event is EventName.RECOVERED), default=0.0)
    later = (one for one in events if one.event is EventName.FAULT_DETECTED and one.time > last)
    return next(later, None)


def recovery_document(ended: EndedRecovery) -> dict[str, Any]:
    """Returns a recovery for programs."""
    account = ended.account
    return {
        "time": timestamp(ended.time_s),
        "generation": account.generation,
        "verdict": account.verdict.value,
        "scope": account.scope,
        "target": account.target,
        "guarantee": account.level.value,
        "replayed_steps": account.replayed_steps,
        "verified": account.verified,
        "duration_s": account.duration_s,
        "breakdown_s": dict(account.breakdown_s),
        "owed_copies": account.owed_copies,
    }
