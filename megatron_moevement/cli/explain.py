# SPDX-License-Identifier: Apache-2.0
"""`moevement explain`: prints the plan of a recovery, stage by stage, from the facts of a job."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from megatron_moevement.cli.inputs import event_folder, read_text
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.facts.facts import Condition, Facts, InconsistentFactsError
from megatron_moevement.policy.facts.facts_document import FACTS, load_facts
from megatron_moevement.policy.recovery.plan import Origin, Plan, SlotFetch, Verdict
from megatron_moevement.policy.recovery.recovery_planner import plan_start
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.observation.events import kept_documents

HELP = "print how a job recovers from given facts"
DESCRIPTION = """
Prints what a job does after a failure, decided from what its processes publish: verdict and reason,
who lost what, what each pipeline stage replays, and from whom it gets slots and logs. A job with
--moevement-event-dir leaves the facts of each of its recoveries there: give that folder for all of
them, or one file. The form of FACTS.json is that of docs/examples/facts.json.
"""

_NAMED = 4
"""As many processes or ranks are named; the others are counted."""

_LISTED = 8
"""As many ranks have a line of what they lost."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement explain`."""
    parser.add_argument(
        "facts",
        type=Path,
        metavar="EVENT_DIR | FACTS.json",
        help="folder of a job's events, or the folder that has it as `events`, or a file with what "
        "its processes published",
    )
    add_json_flag(parser, "the plans as JSON, by file")


def run(args: argparse.Namespace) -> int:
    """Plans and prints."""
    is_one = not args.facts.is_dir()
    files = [args.facts] if is_one else _facts_in(args.facts)
    if not files:
        raise UserError(
            f"{args.facts} holds no facts of a recovery; give the --moevement-event-dir of a job "
            "that recovered, or a file of facts"
        )
    document, shown = {}, list[RenderableType]()
    for file in files:
        facts = load_facts(read_text(file), str(file))
        plan = _plan(facts, file)
        document[str(file)] = None if plan is None else _document(facts, plan)
        shown += [] if is_one else [f"--- {file}"]
        shown += _explanation(facts, plan)
    show(args, document, shown)
    return ExitCode.DONE


def _facts_in(folder: Path) -> list[Path]:
    return kept_documents(folder, FACTS) or kept_documents(event_folder(str(folder)), FACTS)


def _plan(facts: Facts, path: Path) -> Plan | None:
    try:
        return plan_start(facts)
    except InconsistentFactsError as error:
        raise UserError(f"{path} has no plan, the protocol was broken: {error}") from error


def _explanation(facts: Facts, plan: Plan | None) -> list[RenderableType]:
    if plan is None:
        return [f"generation {facts.generation}: nothing in memory is newer than {_durable(facts)}"]
    lines = [f"{plan.verdict.value}: {plan.reason}", *_summary(plan)]
    lines += _losses(facts, plan.target)
    return ["\n".join(lines), _table(facts, plan), "\n".join(_closing(plan))]


def _document(facts: Facts, plan: Plan) -> dict[str, Any]:
    return {
        "generation": plan.generation,
        "verdict": plan.verdict.value,
        "reason": plan.reason,
        "target": plan.target,
        "replayed_steps": plan.replayed_steps,
        "window": plan.window and plan.window.document,
        "persisted": plan.persisted and plan.persisted.document,
        "scope": plan.scope_kind.value,
        "segments": plan.segments,
        "stages": [_activity(plan, stage) for stage in range(facts.layout.pp)],
        "copies": {str(copy.rank): copy.source for copy in plan.copies},
        "ledger_source": plan.ledger_source,
        "lost_steps": plan.lost_steps,
        "digest": plan.digest,
    }


def _durable(facts: Facts) -> str:
    if facts.durable:
        return f"the durable checkpoint of step {facts.durable}"
    return "the initial weights"


def _summary(plan: Plan) -> list[str]:
    lines = [f"generation {plan.generation}, target {plan.target}, {_steps(plan.replayed_steps)}"]
    if plan.window is not None:
        lines.append(f"replay from the window {_window(plan.window)}")
    if plan.persisted is not None and plan.persisted != plan.window:
        lines.append(f"newest persisted window {_window(plan.persisted)}")
    if plan.segments:
        segments = ", ".join("-".join(map(str, segment)) for segment in plan.segments)
        lines.append(f"scope {plan.scope_kind.value}: {segments}")
    if plan.ledger_source is not None:
        lines.append(f"ledger from p{plan.ledger_source}")
    return lines


def _losses(facts: Facts, target: int) -> list[str]:
    """Returns which ranks don't stand at the target, and what is left of each."""
    lines = []
    for rank, process in sorted(facts.by_rank.items()):
        live, name = process.live, f"{rank} (p{process.process} on {process.domain})"
        own = sum(one.slots.bit_count() for one in process.holdings if one.owner == rank)
        slots = f"{own} slots of its own are left" if own else "no slot of its own is left"
        match live.condition:
            case Condition.ABSENT:
                lines.append(f"lost: the live state of {name}; {slots}")
            case Condition.TORN:
                lines.append(f"lost: the live state of {name}, torn in a commit; {slots}")
            case Condition.PARTIAL:
                lines.append(f"interrupted: the replay of {name} at step {live.step}; {slots}")
            case Condition.DENSE if live.step != target:
                lines.append(f"behind: {name} holds step {live.step}; {slots}")
    rest = len(lines) - _LISTED
    return lines[:_LISTED] + ([f"and {rest} ranks more"] if rest > 0 else [])


def _steps(count: int) -> str:
    return f"at most {count} steps replayed" if count else "nothing is replayed"


def _window(window: Window) -> str:
    return f"of steps {window.start} to {window.last} (epoch {window.schedule_version})"


def _closing(plan: Plan) -> list[str]:
    lines = []
    if plan.roll_forward:
        ranks = [str(roll.rank) for roll in plan.roll_forward]
        steps = sorted({roll.step for roll in plan.roll_forward})
        to_steps = ", ".join(map(str, steps))
        lines.append(f"roll forward to {to_steps}: {_shortened(ranks)}")
    if plan.copies:
        copies = [f"{copy.rank} from p{copy.source}" for copy in plan.copies]
        lines.append(f"copied: {_shortened(copies)}")
    if plan.verdict is Verdict.ROLLBACK:
        lines.append(f"training goes on with step {plan.target + 1}; later work is lost")
    else:
        lines.append(f"training goes on with step {plan.target + 1}; no work is lost")
    return [*lines, f"digest {plan.digest}"]


def _table(facts: Facts, plan: Plan) -> Table:
    loaded: dict[int, list[SlotFetch]] = {}
    for fetch in plan.slot_fetches():
        loaded.setdefault(fetch.rank.pp, []).append(fetch)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("does", no_wrap=True)
    for title in ("slots", "from", "logs of stage"):
        table.add_column(title, overflow="fold")
    for stage in range(facts.layout.pp):
        slots, senders = _slots(facts, plan, loaded.get(stage, []))
        table.add_row(str(stage), _activity(plan, stage), slots, senders, _logs(plan, stage))
    return table


def _activity(plan: Plan, stage: int) -> str:
    if plan.verdict is Verdict.ROLLBACK:
        return f"loads the checkpoint of step {plan.target}"
    if stage not in plan.start_of:
        return _standing(plan, stage)
    origin = next(replay.origin for replay in plan.replays if replay.stage == stage)
    start = plan.start(stage)
    durable = f"the checkpoint of step {start}" if start else "the initial state"
    basis = {
        Origin.WINDOW: "the window",
        Origin.KEPT: f"its kept S_{start}",
        Origin.DURABLE: durable,
    }[origin]
    if start == plan.target:
        return f"takes its state from {basis}"
    return f"replays ({start}, {plan.target}] from {basis}"


def _standing(plan: Plan, stage: int) -> str:
    """Returns what a stage does that replays nothing, in words."""
    if any(copy.rank.pp == stage for copy in plan.copies):
        return f"copies S_{plan.target} where it is lost"
    if plan.verdict in {Verdict.RESUME, Verdict.COPIED}:
        return f"keeps S_{plan.target}"
    serves = any(log.sender == stage for log in plan.logs)
    return "bystander, serves logs" if serves else "bystander"


def _slots(facts: Facts, plan: Plan, fetches: list[SlotFetch]) -> tuple[str, str]:
    """Returns which slots of the window the ranks of a stage get, and how many from whom."""
    replays = {replay.stage for replay in plan.replays}
    fetches = [
        fetch
        for fetch in fetches
        if fetch.slot.window == plan.window
        and (fetch.rank.pp in replays or fetch.source != facts.by_rank[fetch.rank].process)
    ]
    if not fetches:
        return "", ""
    sent = Counter(
        fetch.source for fetch in fetches if fetch.source != facts.by_rank[fetch.rank].process
    )
    kept = len(fetches) - sent.total()
    parts = [f"own x{kept}"] if kept else []
    parts += [f"p{process} x{count}" for process, count in sorted(sent.items())]
    slots = [fetch.slot.slot for fetch in fetches]
    return f"{min(slots)}..{max(slots)}", _shortened(parts)


def _logs(plan: Plan, stage: int) -> str:
    return ", ".join(
        f"{log.sender} {log.direction.value}: {log.first}..{log.last}"
        for log in plan.logs
        if log.receiver == stage
    )


def _shortened(parts: Iterable[str]) -> str:
    parts = list(parts)
    rest = len(parts) - _NAMED
    return ", ".join(parts[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
