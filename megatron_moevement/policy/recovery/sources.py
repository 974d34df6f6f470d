# SPDX-License-Identifier: Apache-2.0
"""Sources: which windows, whose ledger and whose logs a plan may be made of."""

from __future__ import annotations

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.job.segments import senders_to
from megatron_moevement.policy.recovery.plan import LogSource
from megatron_moevement.policy.window.schedule import Window


def candidates(facts: Facts) -> tuple[Window, ...]:
    """Returns the windows that may be replayed from, newest first.

    What any survivor learnt to be persisted at a commit barrier is persisted for the job. A window
    that nobody learnt of is not chosen, even where its slots seem to be there.
    """
    learnt = {process.persisted for process in facts.processes} - {None}
    if not learnt:
        return ()
    newest = max(window for window in learnt if window is not None)
    held = {holding.window for process in facts.processes for holding in process.holdings}
    return tuple(sorted((window for window in held if window <= newest), reverse=True))


def find_ledger(facts: Facts, first: int, last: int) -> int | None:
    """Returns a process that has the ledger entries of the steps [first, last], a rank's first."""
    for process in sorted(facts.processes, key=lambda process: process.rank is None):
        if last < first or (first in process.ledger and last in process.ledger):
            return process.process
    return None


def log_sources(facts: Facts, begins: dict[int, int]) -> tuple[LogSource, ...]:
    """Returns which logs are served where stages begin at these steps."""
    sources = []
    for stage, start in sorted(begins.items()):
        for direction, sender in senders_to(facts.layout, stage):
            if begins[sender] > start:
                source = LogSource(stage, sender, direction, start + 1, begins[sender])
                sources.append(source)
    return tuple(sources)
