"""`moevement recoveries`: what each recovery of a run came down to, and how long it took."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_moevement.cli.inputs import events_in
from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.outcome.account import RankAccount, RecoveryAccount
from megatron_moevement.policy.recovery.plan import Verdict
from megatron_moevement.runtime.observation.events import EventName, EventRecord

HELP = "show the recoveries of a run"
DESCRIPTION = """
Prints one line for each recovery of a run, from its events.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds its flags."""
    parser.add_argument("event_dir", metavar="DIR", help="the run's --moevement-event-dir")
    parser.add_argument(
        "--require",
        metavar="VERDICT",
        choices=[verdict.value for verdict in Verdict],
        help="fail unless there were recoveries, each with this verdict and with no replay that "
        "differed from the first time",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the recoveries; judges them if asked to."""
    recoveries = recoveries_of(events_in(args.event_dir))
    for recovery in recoveries:
        print(recovery.line)
    if args.require is None:
        return ExitCode.DONE
    wanted = Verdict(args.require)
    if not recoveries:
        print(f"no recovery, {wanted.value} is required")
    wrong = [each for each in recoveries if each.verdict is not wanted or not each.verified]
    for each in wrong:
        print(f"generation {each.generation}: {wanted.value} with the same bits is required")
    return ExitCode.FAILURE if wrong or not recoveries else ExitCode.DONE


def recoveries_of(events: Sequence[EventRecord]) -> list[RecoveryAccount]:
    """Returns the recoveries that ended, in the order of time.

    Args:
        events: of all processes, in the order of time. A launch with the same folder as the one
            before it begins with generation 0 again, so a rank that tells of the same generation
            again tells of another recovery.
    """
    found: list[list[EventRecord]] = []
    for record in events:
        if record.event is not EventName.RECOVERED:
            continue
        place = (record.generation, record.iteration)
        told = found[-1] if found else []
        ranks = {one.logical_rank for one in told}
        if {(one.generation, one.iteration) for one in told} == {place} and (
            record.logical_rank not in ranks
        ):
            told.append(record)
        else:
            found.append([record])
    return [_account(told) for told in found]


def _account(told: Sequence[EventRecord]) -> RecoveryAccount:
    first = told[0]
    return RecoveryAccount(
        generation=first.generation,
        verdict=Verdict(first.fields["verdict"]),
        scope=tuple(first.fields["scope"]),
        target=first.iteration,
        level=Level(first.fields["guarantee"]),
        ranks=[
            RankAccount.out_of(
                # A log of an older build says nothing of copies that were moved.
                {"moved_copies": 0, **one.fields, "proof": one.fields["replay_proof"]}
            )
            for one in told
        ],
    )
