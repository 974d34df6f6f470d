# SPDX-License-Identifier: Apache-2.0
"""Roll call: which processes of a launch are there, before any of them waits for another one.

A process that dies before anything watches it is missed by nobody: whoever counts on it waits until
its time is over. So the processes of a launch agree in rounds on who is there. A round holds once
every process that was called is watched. Where one is gone before, all call the roll again.

The launcher notes who is gone; without such notes a process that does not answer in time is. All
notes are sealed: what nobody of the job wrote does not count.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any

import torch.distributed as dist

from megatron_moevement.errors import MoEvementError
from megatron_moevement.runtime.coordination.generation import Loss
from megatron_moevement.runtime.security.seal import BrokenSealError, Seal
from megatron_moevement.settings.secret import Secret

Store = Any
"""torch's stores, which are not typed."""

_POLL_S = 0.05
_GONE = "moevement/gone"
_ENDS = "moevement/ends"
_NOTED = "moevement/noted"
_STOP = "moevement/stop"
_END_POLL_S = 0.005
"""All processes wait for what is on its way, with training at a standstill."""
_END_PATIENCE_S = 1.0
"""A launcher notes an end at once; what it says of one is worth no more of an outage."""


class LostAtStartError(MoEvementError):
    """A process that was called is gone and was never watched: the roll is to be called again."""


@dataclasses.dataclass(frozen=True)
class JobStop:
    """Why the processes of a job stopped it, and the losses that ended its newest generation."""

    reason: str
    losses: tuple[Loss, ...]


class _Outcome(Enum):
    HOLDS = "holds"
    AGAIN = "again"


def prefix_of(attempt: str, number: int = 0) -> str:
    """Returns under which prefix the keys of a round lie."""
    return f"attempt{attempt}" + (f".{number}" if number else "")


def promise_notes(store: Store, secret: Secret, attempt: str = "0") -> None:
    """Says that the end of each process of the job will be noted; its launcher calls it."""
    _Notes(store, secret, attempt).agreed(_NOTED, proposed=True)


def note_gone(
    store: Store, process: int, secret: Secret, attempt: str = "0", *, end: str | None = None
) -> None:
    """Notes that a process has ended, whenever that is; the launcher calls it.

    Args:
        end: how it ended; None where the launcher does not know.
    """
    notes = _Notes(store, secret, attempt)
    if end is not None:
        notes.add(_ENDS, [process, end])
    notes.add(_GONE, process)


def noted_stop(store: Store, secret: Secret, attempt: str = "0") -> JobStop | None:
    """Returns why the processes stopped the job, as the first of them noted it; None: none did."""
    document = _Notes(store, secret, attempt).agreed(_STOP)
    if document is None:
        return None
    return JobStop(document["reason"], tuple(Loss(**loss) for loss in document["losses"]))


def newest_round(store: Store, attempt: str = "0") -> int:
    """Returns the number of the newest round on whose members the processes have agreed."""
    number, prefix = 0, prefix_of(attempt)
    while store.check([f"{prefix}/{_key(number + 1, 'called')}"]):
        number += 1
    return number


def first_proposed(
    store: Store, key: str, proposed: str | None, opened: Callable[[bytes], Any]
) -> Any:
    """Returns what the first process has proposed that proposed anything, None before that.

    Args:
        proposed: by this process, sealed; None: nothing.
        opened: returns the document of a text, None where no process of this job wrote it.
    """
    text = store.get(key) if store.check([key]) else b""
    known = opened(text) if text else None
    if known is not None or proposed is None:
        return known
    return opened(store.compare_set(key, text, proposed))


class RollCall:
    """The rounds of one process. Its own thread calls the roll; a process that watches it notes so.

    Attributes:
        number: of the round; they count from 0.
    """

    def __init__(
        self, process: int, processes: int, *, secret: Secret, attempt: str, patience: timedelta
    ) -> None:
        """Calls nobody yet.

        Args:
            processes: that were launched.
            patience: how long a process is waited for that is not noted to be gone.
        """
        self.number = -1
        self._process = process
        self._everybody = frozenset(range(processes))
        self._secret, self._attempt = secret, attempt
        self._patience_s = patience.total_seconds()
        self._caller = (os.getpid(), threading.get_ident())
        self._called: frozenset[int] = frozenset()
        self._holds = False
        self._deadline_s = 0.0

    def call(self, store: Store) -> tuple[int, ...]:
        """Begins a round; returns the numbers of the processes that take part in it."""
        self.number += 1
        notes = self._notes(store)
        self._deadline_s = time.monotonic() + self._patience_s
        while (called := notes.agreed(_key(self.number, "called"))) is None:
            here, gone = notes.all(_key(self.number, "here")), notes.all(_GONE)
            if self._process not in here:
                notes.add(_key(self.number, "here"), self._process)
            elif here | gone >= self._everybody or time.monotonic() >= self._deadline_s:
                notes.agreed(_key(self.number, "called"), sorted(here - gone))
            else:
                time.sleep(_POLL_S)
        self._called = frozenset(called)
        self._deadline_s = time.monotonic() + self._patience_s
        return tuple(sorted(self._called))

    def note_watched(self, store: Store) -> None:
        """Notes that this process is watched from now on; its watcher, another one, calls it."""
        if os.getpid() != self._caller[0]:
            self._notes(store).add(_key(self.number, "watched"), self._process)

    def check(self, store: Store) -> None:
        """Checks that the round can still come to hold; other threads and processes need not.

        Raises:
            LostAtStartError: it can't, and all processes of it find the same.
        """
        if self._holds or (os.getpid(), threading.get_ident()) != self._caller:
            return
        notes = self._notes(store)
        watched = notes.all(_key(self.number, "watched"))
        lost = (self._called & notes.all(_GONE)) - watched
        outcome: _Outcome | None = None
        if watched >= self._called:
            outcome = _Outcome.HOLDS
        elif lost or time.monotonic() >= self._deadline_s:
            outcome = _Outcome.AGAIN
        found = notes.agreed(
            _key(self.number, "outcome"), None if outcome is None else outcome.value
        )
        self._holds = found == _Outcome.HOLDS.value
        if found == _Outcome.AGAIN.value:
            missing = ", ".join(map(str, sorted(lost or self._called - watched)))
            raise LostAtStartError(f"process {missing or 'of another one'} was lost at the start")

    def await_hold(self, store: Store) -> None:
        """Waits until every process of the round is watched.

        Raises:
            LostAtStartError: one is gone before.
        """
        self.check(store)
        while not self._holds:
            time.sleep(_POLL_S)
            self.check(store)

    def ends(self, store: Store, awaited: Collection[int]) -> Mapping[int, str]:
        """Returns how processes have ended, as far as the launcher says it.

        Args:
            awaited: processes that are known to have ended; a launcher that notes ends is given a
                moment to do so.
        """
        notes = self._notes(store)
        deadline_s = time.monotonic() + (_END_PATIENCE_S if notes.agreed(_NOTED) else 0.0)
        while True:
            found = {int(process): str(end) for process, end in notes.documents(_ENDS)}
            if found.keys() >= set(awaited) or time.monotonic() >= deadline_s:
                return found
            time.sleep(_END_POLL_S)

    def note_stop(self, store: Store, reason: str, losses: Sequence[Loss]) -> None:
        """Notes for the launcher why the job stops, unless another process has done so.

        Args:
            losses: that ended the newest generation.
        """
        told = [dataclasses.asdict(loss) for loss in losses]
        self._notes(store).agreed(_STOP, {"reason": reason, "losses": told})

    def _notes(self, store: Store) -> _Notes:
        return _Notes(store, self._secret, self._attempt)


class _Notes:
    """What processes of the job, and its launcher, have noted in a store."""

    def __init__(self, store: Store, secret: Secret, attempt: str) -> None:
        self._store: Store = dist.PrefixStore(  # type: ignore[attr-defined]
            prefix_of(attempt), store
        )
        self._seal = Seal(secret.derive("roll call", attempt))

    def add(self, key: str, document: Any) -> None:
        self._store.append(key, f"\n{self._seal.close(key, document)}\n")

    def all(self, key: str) -> frozenset[int]:
        return frozenset(self.documents(key))

    def documents(self, key: str) -> list[Any]:
        if not self._store.check([key]):
            return []
        lines = [line for line in self._store.get(key).split(b"\n") if line]
        return [one for line in lines if (one := self._opened(key, line)) is not None]

    def agreed(self, key: str, proposed: Any = None) -> Any:
        """Returns what the first process has proposed that proposed anything, None before that."""
        sealed = None if proposed is None else self._seal.close(key, proposed)
        return first_proposed(self._store, key, sealed, lambda text: self._opened(key, text))

    def _opened(self, key: str, text: bytes) -> Any:
        try:
            return self._seal.open(key, text)
        except BrokenSealError:
            return None


def _key(number: int, name: str) -> str:
    return f"moevement/roll{number}/{name}"
