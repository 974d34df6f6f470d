# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose: scripted ones, and drawn ones that come at a rate or as in a trace."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.policy.faults.failure_trace import Failure, read_trace
from megatron_moevement.policy.faults.fault_schedule import (
    FaultKind,
    TimedFault,
    poisson_faults,
    trace_faults,
)
from megatron_moevement.settings.checks import Checks
from megatron_moevement.settings.faults import Fault
from megatron_moevement.settings.flags import SEED, Range, flag

# Wide enough for anybody, and far from where times overflow or come to a stand.
_SECONDS = Range("from 0.001 to 1e9", lambda value: 0.001 <= value <= 1e9)
_SPEED = Range("from 0.001 to 1e6", lambda value: 0.001 <= value <= 1e6)


@dataclasses.dataclass(frozen=True)
class FaultInjection:
    """Processes that fail on purpose; the same on all ranks."""

    moevement_faults: tuple[Fault, ...] = flag(
        (),
        "what happens at a place of a step, as in 7:barrier, stop:7:commit@0",
        nargs="+",
        parse=Fault.parse,
        metavar="[KIND:]STEP:PLACE[@RANKS][#GENERATION]",
    )
    moevement_mtbf: float | None = flag(
        None, "mean seconds between two faults of the job", within=_SECONDS, metavar="SECONDS"
    )
    moevement_fault_trace: str | None = flag(
        None, "strike when nodes failed in this trace", metavar="FILE"
    )
    moevement_fault_trace_speed: float = flag(
        1.0,
        "how many times faster than it happened the trace passes",
        within=_SPEED,
        metavar="TIMES",
    )
    moevement_fault_kinds: tuple[FaultKind, ...] = flag(
        (FaultKind.KILL,),
        "what is drawn: kill, stop, exception, exit, segfault",
        nargs="+",
        metavar="KIND",
    )
    moevement_fault_seed: int = flag(
        0,
        "seed of all that is drawn",
        within=SEED,
        metavar="SEED",
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is to fail."""
        return bool(self.moevement_faults) or self.draws

    @property
    def draws(self) -> bool:
        """Whether faults are drawn that strike at a time."""
        return self.moevement_mtbf is not None or self.moevement_fault_trace is not None

    def timed_faults(self, world_size: int) -> Iterator[TimedFault]:
        """Yields the faults that are drawn, by time; without end where there is a rate.

        Raises:
            UserError: the trace can't be read; at the first fault.
        """
        kinds, seed = self.moevement_fault_kinds, self.moevement_fault_seed
        if self.moevement_mtbf is not None:
            mtbf = timedelta(seconds=self.moevement_mtbf)
            yield from poisson_faults(mtbf, world_size, kinds, seed)
        elif self.moevement_fault_trace is not None:
            failures = _read(self.moevement_fault_trace)
            speed = self.moevement_fault_trace_speed
            yield from trace_faults(failures, world_size, kinds, seed, speed)


def _read(path: str) -> tuple[Failure, ...]:
    try:
        return read_trace(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--moevement-fault-trace {path}: {error.strerror or error}") from error
    except ValueError as error:  # of the text, or of its encoding
        raise UserError(f"--moevement-fault-trace {path}: {error}") from error


def check_fault_injection(settings: FaultInjection, world_size: int, train_iters: int) -> None:
    """Checks that what is to fail can fail; reads the trace.

    Raises:
        UserError: there is no such rank or step, two faults strike one rank at one place, the
            trace can't be read, or there are two sources of drawn faults.
    """
    checks = Checks()
    checks.passes(_check_scripted, settings.moevement_faults, world_size, train_iters)
    if settings.moevement_mtbf is not None and settings.moevement_fault_trace is not None:
        checks.refuse("--moevement-mtbf and --moevement-fault-trace exclude each other")
    if settings.moevement_fault_trace is not None:
        checks.passes(lambda: next(settings.timed_faults(world_size)))
    for name in ("moevement_fault_seed", "moevement_fault_kinds", "moevement_fault_trace_speed"):
        given = getattr(settings, name) != getattr(FaultInjection(), name)
        traced = settings.moevement_fault_trace is not None
        if given and not (traced if name == "moevement_fault_trace_speed" else settings.draws):
            sources = "" if name == "moevement_fault_trace_speed" else "--moevement-mtbf or "
            checks.refuse(f"--{name.replace('_', '-')} needs {sources}--moevement-fault-trace FILE")
    checks.end()


def _check_scripted(faults: tuple[Fault, ...], world_size: int, train_iters: int) -> None:
    struck = frozenset(rank for fault in faults for rank in fault.ranks or ())
    if struck and max(struck) >= world_size:
        raise UserError(
            f"--moevement-faults: there is no rank {max(struck)}, the job has {world_size}; name "
            f"ranks from 0 to {world_size - 1}"
        )
    late = [fault for fault in faults if fault.step > train_iters]
    if late:
        raise UserError(
            f"--moevement-faults: {late[0]} can never strike, the last step is {train_iters}"
        )
    for rank in range(world_size):
        places = Counter(
            (fault.step, fault.place, fault.generation) for fault in faults if fault.strikes(rank)
        )
        for (step, place, _), count in places.items():
            if count > 1:
                raise UserError(
                    f"--moevement-faults: rank {rank} is struck {count} times at "
                    f"{step}:{place.value}; once is enough"
                )
