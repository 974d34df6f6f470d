# SPDX-License-Identifier: Apache-2.0
"""Resident state: what a process keeps for its strategy over the restarts of its job.

A process makes one at its start and has it to its end; each generation that it is in opens a
strategy from it. `training/` knows a strategy by this and by `Strategy` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from megatron_moevement.backends.backend import Pin
from megatron_moevement.policy.outcome.account import RecoveryAccount
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.observation.events import Events
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Protected:
    """What a generation gives to the strategy that protects it.

    Attributes:
        objects: returns the live objects; every rank has them.
        events: told of what the strategy does.
        generation: owns threads and connections.
        domain: what this process may be lost together with.
        train_iters: the last step.
        notices: lines for the user, printed on one rank.
        recovered: is given each recovery once its ranks go on; every rank calls it.
        saves: folders of durable checkpoints.
    """

    objects: Callable[[], LiveObjects]
    events: Events
    generation: Generation
    domain: str
    train_iters: int
    notices: Notices
    recovered: Callable[[RecoveryAccount], None]
    saves: Sequence[Path]


class ProcessStore:
    """The files of a process, which outlive it; the base has none."""

    refusal: str | None = None
    """Why this process can't have its files on its machine; None while it can."""

    is_over = False
    """Whether this process waits for a place in a job of which a rank has finished."""

    @property
    def folder(self) -> Path | None:
        """Where they lie; None before there are any."""
        return None

    @property
    def has_state(self) -> bool:
        """Whether a later launch could go on from what is kept."""
        return False

    def keep(self) -> None:
        """Begins a generation, which goes on from the files; `close` leaves them for the next."""

    def stay(self) -> None:
        """Has `close` leave the files: the job stops before all ranks have finished."""

    def flush(self, save: Path) -> Path:
        """Writes the files to durable storage; called where there is a state.

        Args:
            save: folder of the durable checkpoints.

        Returns:
            Where they are now.

        Raises:
            OSError: they could not be written; they are still where they were.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state to write to {save}")

    def abandon(self, patience: timedelta) -> None:
        """Removes the files of all processes of the run on this machine: Ctrl-C was pressed.

        Args:
            patience: how long to wait for processes that are about to end.
        """

    def close(self) -> None:
        """Lets go of the files at the end of the process; removes them if nobody will go on."""


class IdleSpare:
    """A process without a rank that keeps nothing for the ranks."""

    def look(self) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""


class ResidentState:
    """What a process keeps for its strategy; the base keeps nothing, and its strategy is `off`.

    The training thread calls all methods. A process without a rank calls `hold` in a generation,
    one with a rank `open`. It calls `renew` before it builds model and optimizer: when it gets
    another rank, or no state of theirs can be brought back.
    """

    def __init__(self) -> None:
        """Begins without files."""
        self.store = ProcessStore()

    def open(self, protected: Protected) -> Strategy:
        """Returns what protects a job for one generation; every rank calls it, in step. Close it.

        Raises:
            UserError: on all ranks: the job can't be protected as it was asked for.
        """
        del protected
        return Strategy()

    def hold(self, launch: Launch, domain: str, generation: Generation, pin: Pin) -> IdleSpare:
        """Returns what this process does for the ranks while it waits for a place.

        Args:
            launch: of this process.
            domain: what it may be lost together with.
            generation: in which it waits.
            pin: makes host memory a target of asynchronous copies.
        """
        del launch, domain, generation, pin
        return IdleSpare()

    def renew(self) -> None:
        """Gives up what is kept of the live objects; what belongs to the process stays."""

    def note_outage(self, durations_s: Mapping[str, float], joined_s: float) -> None:
        """Notes how long the parts of a restart took that lie before the strategy's.

        Args:
            durations_s: in seconds, by part.
            joined_s: when the present generation had its groups, in seconds since the epoch.
        """
