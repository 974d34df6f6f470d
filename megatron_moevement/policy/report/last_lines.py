# SPDX-License-Identifier: Apache-2.0
"""The last lines of a job that lost processes: who was lost and where, what is kept, what to do."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from megatron_moevement.errors import ExitCode
from megatron_moevement.policy.report.casualties import Casualty, Describe, summary

_NAMED = 8
"""So many processes are named in a line."""


@dataclasses.dataclass(frozen=True)
class ProcessStop:
    """A process stops because its job does.

    Attributes:
        reason: why the job stops.
        casualties: whose loss led to it, where that is known.
        where: the state of the process lies there; None where it keeps none.
        step: the newest step that the process has; 0 for none.
        first: what is to be done before another launch, up to the verb; empty for nothing.
        event_dir: where the job records events; None where it does not.
    """

    process: int
    reason: str
    casualties: Sequence[Casualty]
    where: str | None
    step: int
    first: str
    event_dir: str | None

    @property
    def line(self) -> str:
        """All of it."""
        lost = summary(self.casualties)
        text = f"process {self.process} stops: {self.reason}"
        text += "" if lost is None else f", after {lost}"
        if self.where is not None:
            text += f"; its state is in {self.where}: {self.first}launch the job again to go on"
        elif self.first:
            text += f"; {self.first}launch the job again"
        else:
            text += "; it keeps no state of the job"
        text += f"; its newest step is {self.step}" if self.step else ""
        return text + _report(self.event_dir)


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """A job ends, as its launcher sees it.

    Attributes:
        code: its exit code.
        ends: number and exit code of each process, negative for a signal, in the order of ends.
        host: of the processes.
        reason: why the processes stopped the job; None where they did not, or did not say it.
        casualties: whose loss led to it, as the others found them.
        is_protected: whether a strategy keeps state in memory.
        event_dir: where the job records events; None where it does not.
    """

    code: int
    ends: Sequence[tuple[int, int]]
    host: str
    is_protected: bool
    reason: str | None = None
    casualties: Sequence[Casualty] = ()
    event_dir: str | None = None

    def line(self, describe: Describe) -> str | None:
        """Returns all of it; None where it is said already, or all went well.

        Args:
            describe: returns how a process ended, from its exit code.
        """
        lost = self._lost(describe)
        if not any(code for _, code in self.ends) or self.code == ExitCode.BAD_ARGUMENTS:
            return None  # whoever refused them has said it
        if self.code == ExitCode.DONE:
            return f"the job is done in spite of what was lost: {lost}{_report(self.event_dir)}"
        because = f"the job ended with exit code {self.code}: {lost}"
        return f"{because}; {self._advice()}{_report(self.event_dir)}"

    def _lost(self, describe: Describe) -> str:
        """Returns why, and who was lost: of the newest generation, then before."""
        ended = dict(self.ends)
        newest = [
            dataclasses.replace(one, end=describe(code)) if code not in {None, 0, _KEPT} else one
            for one in self.casualties
            for code in [ended.get(one.process)]
        ]
        known = {one.process for one in newest}
        rest = [
            f"process {process} on {self.host} {describe(code)}"
            for process, code in self.ends
            if process not in known and code and (code != _KEPT or self.code != _KEPT)
        ]
        found = [] if self.reason is None else [self.reason]
        found += [text for text in [summary(newest)] if text is not None] + rest[:_NAMED]
        found += [f"and {len(rest) - _NAMED} more"] if len(rest) > _NAMED else []
        return "; ".join(found) or "each process has a line with the reason (above)"

    def _advice(self) -> str:
        if self.code == _KEPT:
            kept = sum(code == _KEPT for _, code in self.ends)
            return (
                f"{kept} of {len(self.ends)} processes keep their state (above: where): launch the "
                "job again as it was, with as many ranks, to go on"
            )
        again = "a launch goes on from the newest checkpoint"
        if self.code == ExitCode.INTERRUPTED:
            return f"nothing is kept in memory, {again}"
        if self.is_protected:
            return (
                "what processes keep in memory is still there: mend the reason (above) and launch "
                "the job again as it was to go on (`moevement inspect` shows what is kept)"
            )
        return f"mend the reason (above), {again}"


_KEPT = ExitCode.STATE_FLUSHED


def _report(event_dir: str | None) -> str:
    if event_dir is None:
        return ""
    return f"; `moevement report {shlex.quote(event_dir)}` shows what happened"
