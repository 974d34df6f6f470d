# SPDX-License-Identifier: Apache-2.0
"""A generation: the time between two restarts, and what must not outlive it.

A restart interrupts the training thread by an exception that may come at any instruction. So what
needs closing is opened where nothing interrupts, and noted at once. Whoever unwinds first closes
it, and `Generation.close` closes what nobody has.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.recovery.lifecycle import Event, Phase, advance
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.runtime.coordination.notice_board import NoticeBoard


class Closeable(Protocol):
    """What is open until it is closed; closing it again does nothing."""

    def close(self) -> None:
        """Ends threads, connections and hooks."""


C = TypeVar("C", bound=Closeable)


class InterruptedGenerationError(MoEvementError, RuntimeError):
    """A restart was asked for while this rank was in a step: its collectives prove nothing."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A process that a generation has lost, or that ended it.

    Attributes:
        rank: the place that it occupied; None for a spare.
        reason: why it counts as lost, or what it reported.
        end: how it ended, as its launcher says; None where that one does not say it.
    """

    process: int
    rank: int | None
    host: str
    reason: str
    end: str | None = None

    @property
    def line(self) -> str:
        """All of it, for people."""
        place = "a spare" if self.rank is None else f"rank {self.rank}"
        end = "" if self.end is None else f"; it {self.end}"
        return f"process {self.process} ({place}) on {self.host}: {self.reason}{end}"


@dataclasses.dataclass
class Interruption:
    """The newest interruption of this process; who interrupts it writes, any thread."""

    noticed_s: float | None = None
    """When it was noticed, in seconds since the epoch."""
    losses: tuple[Loss, ...] = ()
    """What led to the present generation."""


class Generation(Closing):
    """One generation of one process; the training thread uses it."""

    def __init__(
        self,
        number: int = 0,
        uninterrupted: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        ping: Callable[[], None] = lambda: None,
        rest: Callable[[], None] = lambda: None,
        *,
        spares: int | None = None,
        board: NoticeBoard | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begins with nothing open.

        Args:
            number: in-process restarts before it, the same on all ranks.
            uninterrupted: encloses what a restart waits for. It must be short and wait for no other
                process.
            ping: restarts the progress watchdog, from the end of the first step on.
            rest: suspends the progress watchdog until the next `ping`.
            spares: processes that wait for a place; None where none could come in.
            board: where ranks and spares read what the others post; None where there are none.
            is_interrupted: whether a restart of the job was asked for, before which no collective
                of any rank is aborted.
        """
        self.number = number
        self.uninterrupted = uninterrupted
        self.phase = Phase.PLANNING
        self.ping = ping
        self.rest = rest
        self._observe: Callable[[Phase], None] = lambda phase: None
        self.spares = spares
        self.board = board
        self._is_interrupted = is_interrupted
        self._owned: list[Closeable] = []

    def observe(self, observer: Callable[[Phase], None]) -> None:
        """Lets an observer see each phase from now on."""
        self._observe = observer

    def advance(self, event: Event) -> None:
        """Enters the phase that follows an event; where no steps follow each other, nobody is late.

        Raises:
            IllegalEventError: the event can't happen now.
        """
        self.phase = advance(self.phase, event)
        if not self.phase.makes_steps:
            self.rest()
        self._observe(self.phase)

    def confirm(self) -> None:
        """Confirms that all collectives that have ended by now have ended as they should.

        What reads the flags of an aborted collective goes on with what is in its buffers, and so
        may the ranks beside it. No rank aborts one before the job's interrupt is on record.

        Raises:
            InterruptedGenerationError: a collective may have been aborted.
        """
        if self._is_interrupted():
            raise InterruptedGenerationError("the job was interrupted in a step")

    def own(self, opening: Callable[[], C]) -> C:
        """Opens something that must not outlive the generation, uninterrupted."""
        with self.uninterrupted():
            opened = opening()
            self._owned.append(opened)
        return opened

    def close(self) -> None:
        """Closes what was opened, the newest first; closing twice is fine."""
        while self._owned:
            self._owned[-1].close()
            self._owned.pop()
