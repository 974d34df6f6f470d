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
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any

import torch.distributed as dist

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.number_runs import numbers_of, runs_of
from megatron_moevement.policy.watching.short_lists import (
    by_list,
    list_of,
    slice_s,
)
from megatron_moevement.runtime.coordination.attendance import Attendance, Looks, list_key
from megatron_moevement.runtime.coordination.elected_reader import ElectedReader
from megatron_moevement.runtime.coordination.generation import Loss
from megatron_moevement.runtime.security.seal import BrokenSealError, Seal
from megatron_moevement.settings.secret import Secret

Store = Any
"""torch's stores, which are not typed."""

_POLL_S = 0.05
"""So often a process looks who is there."""
_FREE_LOOKS = 32
"""So many processes look so often; more share the looks that these would take."""
_SLICE_S = 0.25
_SHORTEST_S = 0.001
_GONE = "moevement/gone"
_ENDS = "moevement/ends"
_NOTED = "moevement/noted"
_STOP = "moevement/stop"
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
        notes.agreed(_end_key(process), proposed=True)
    notes.add(list_key(_GONE, list_of(process)), process)


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
        processes: that were launched.
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
        self.processes = processes
        self._process = process
        self._secret, self._attempt = secret, attempt
        self._patience_s = patience.total_seconds()
        self._caller = (os.getpid(), threading.get_ident())
        self._called: frozenset[int] = frozenset()
        self._holds = self._is_noted = False
        self._reader, self._deadline_s = ElectedReader(process), math.inf
        self._begin(())

    def call(self, store: Store) -> tuple[int, ...]:
        """Begins a round; returns the numbers of the processes that take part in it."""
        here = self.begin(store)
        called = self.called(store)
        while called is None:
            called = self.look(store, here)
            if called is None:
                key = _key(self.number, "called")
                called = _numbers(self._notes(store).await_agreed(key, self._pause_s()))
        self._called = frozenset(called)
        self._begin(by_list(self._called))
        return tuple(sorted(self._called))

    def begin(self, store: Store) -> Attendance:
        """Begins a round; this and the next two are the parts of `call` that do not wait."""
        self.number += 1
        everybody, name = range(self.processes), _key(self.number, "here")
        here = self._notes(store).attendance(name, everybody)
        self._begin(here.lists)
        return here

    def called(self, store: Store) -> list[int] | None:
        """Returns who is called; None before that is agreed."""
        return _numbers(self._notes(store).agreed(_key(self.number, "called")))

    def look(self, store: Store, here: Attendance) -> list[int] | None:
        """Returns who is called, once all others are gone or the time is over; None before that."""
        notes = self._notes(store)
        are_known = self._are_all_known(notes, here)
        is_over = time.monotonic() >= self._deadline_s
        if not (are_known or is_over) or not self._reads_all(notes, "here"):
            return None
        # A list that was whole may have been emptied by a stranger: who is on it notes that again.
        there, gone = notes.whole(here) | {self._process}, notes.gone(here.lists)
        if not is_over and len(there | gone) < self.processes:
            return None
        # All read it: it must not grow with all where nearly all are there.
        called = list(runs_of(there - gone))
        return _numbers(notes.agreed(_key(self.number, "called"), called))

    def _reads_all(self, notes: _Notes, what: str) -> bool:
        """Returns whether this process reads all lists: one does, and the others wait for it.

        Where that one is gone, or takes long, again one reads in its place.
        """
        reads = self._reader.reads(
            lambda place: notes.agreed(_key(self.number, f"{what}_reader{place}"), self._process),
            lambda reader: reader in notes.gone((list_of(reader),)),
        )
        if not reads:
            self._deadline_s = max(self._deadline_s, self._reader.until_s)
        return reads

    def _are_all_known(self, notes: _Notes, here: Attendance) -> bool:
        """Looks whether every process is here or gone, and notes that this one is here."""
        for number in self._looks.due():
            key = here.key(number)
            known = notes.all(key)
            if self._process in here.lists[number] and self._process not in known:
                notes.add(key, self._process)
                known = notes.all(key)  # whoever comes last sees all
            if known | notes.gone((number,)) >= here.lists[number] and here.note_whole(number):
                return True
        return False

    def note_watched(self, store: Store) -> None:
        """Notes that this process is watched from now on; its watcher, another one, calls it."""
        if os.getpid() == self._caller[0] or self._is_noted:
            return
        notes, own = self._notes(store), list_of(self._process)
        watched = notes.attendance(_key(self.number, "watched"), self._called)
        notes.add(watched.key(own), self._process)
        self._is_noted = True
        if notes.all(watched.key(own)) >= watched.lists[own] and watched.note_whole(own):
            notes.agreed(_key(self.number, "outcome"), _Outcome.HOLDS.value)

    def check(self, store: Store) -> None:
        """Checks that the round can still come to hold; other threads and processes need not.

        Raises:
            LostAtStartError: it can't, and all processes of it find the same.
        """
        if self._holds or (os.getpid(), threading.get_ident()) != self._caller:
            return
        notes, key = self._notes(store), _key(self.number, "outcome")
        found = notes.agreed(key)
        if found is None and (outcome := self._outcome(notes)) is not None:
            found = notes.agreed(key, outcome.value)
        self._holds = found == _Outcome.HOLDS.value
        if found == _Outcome.AGAIN.value:
            lost = _numbers(notes.agreed(_key(self.number, "missing"))) or ()
            missing = ", ".join(map(str, lost))
            raise LostAtStartError(f"process {missing or 'of another one'} was lost at the start")

    def _outcome(self, notes: _Notes) -> _Outcome | None:
        """Looks whether all are watched, or one is gone; notes before it says so which one."""
        watched = notes.attendance(_key(self.number, "watched"), self._called)
        lost: frozenset[int] = frozenset()
        for number in self._looks.due():
            unwatched = watched.lists[number] - notes.all(watched.key(number))
            if not unwatched and watched.note_whole(number):
                return _Outcome.HOLDS
            lost |= unwatched and unwatched & notes.gone((number,))
        if not lost:
            if time.monotonic() < self._deadline_s or not self._reads_all(notes, "watched"):
                return None
            lost = self._called - notes.whole(watched)
            if not lost:
                return _Outcome.HOLDS
        notes.agreed(_key(self.number, "missing"), list(runs_of(lost)))
        return _Outcome.AGAIN

    def await_hold(self, store: Store) -> None:
        """Waits until every process of the round is watched.

        Raises:
            LostAtStartError: one is gone before.
        """
        self.check(store)
        while not self._holds:
            self._notes(store).await_agreed(_key(self.number, "outcome"), self._pause_s())
            self.check(store)

    def ends(self, store: Store, awaited: Collection[int]) -> Mapping[int, str]:
        """Returns how processes have ended, as far as the launcher says it.

        Args:
            awaited: processes that are known to have ended; a launcher that notes ends is given a
                moment to do so.
        """
        notes = self._notes(store)
        found = notes.ends()
        missing = set(awaited) - found.keys()
        if missing and notes.agreed(_NOTED):
            # All processes ask at the same time: each waits for one key, in slices as elsewhere.
            keys = [_end_key(process) for process in sorted(missing)]
            deadline_s = time.monotonic() + _END_PATIENCE_S
            while keys and (left_s := deadline_s - time.monotonic()) > _SHORTEST_S:
                if notes.await_agreed(keys[0], min(left_s, slice_s(_SLICE_S, self.processes))):
                    keys.pop(0)
            found = notes.ends()
        return found

    def note_stop(self, store: Store, reason: str, losses: Sequence[Loss]) -> None:
        """Notes for the launcher why the job stops, unless another process has done so.

        Args:
            losses: that ended the newest generation.
        """
        told = [dataclasses.asdict(loss) for loss in losses]
        self._notes(store).agreed(_STOP, {"reason": reason, "losses": told})

    def _begin(self, lists: Iterable[int]) -> None:
        looks = (self._process, lists, _POLL_S)
        self._looks = Looks(*looks, processes=self.processes, free=_FREE_LOOKS)
        self._deadline_s = time.monotonic() + self._patience_s
        self._reader = ElectedReader(self._process)

    def _pause_s(self) -> float:
        """Returns how long to wait for what others agree on."""
        until_s = min(self._looks.left_s(), self._deadline_s - time.monotonic())
        return min(max(until_s, _SHORTEST_S), slice_s(_SLICE_S, self.processes))

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

    def attendance(self, name: str, processes: Iterable[int]) -> Attendance:
        return Attendance(name, processes, add=self.add, read=self.documents)

    def whole(self, attendance: Attendance) -> frozenset[int]:
        """Reads all lists; one process in a round has to, or a few."""
        return frozenset().union(*(self.all(attendance.key(each)) for each in attendance.lists))

    def gone(self, lists: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*(self.all(list_key(_GONE, number)) for number in lists))

    def documents(self, key: str) -> list[Any]:
        if not self._store.check([key]):
            return []
        lines = [line for line in self._store.get(key).split(b"\n") if line]
        return [one for line in lines if (one := self._opened(key, line)) is not None]

    def agreed(self, key: str, proposed: Any = None) -> Any:
        """Returns what the first process has proposed that proposed anything, None before that."""
        sealed = None if proposed is None else self._seal.close(key, proposed)
        return first_proposed(self._store, key, sealed, lambda text: self._opened(key, text))

    def ends(self) -> dict[int, str]:
        return {int(process): str(end) for process, end in self.documents(_ENDS)}

    def await_agreed(self, key: str, longest_s: float) -> Any:
        """Waits for what processes agree on; returns None where that takes longer."""
        deadline_s = time.monotonic() + longest_s
        try:
            self._store.wait([key], timedelta(seconds=longest_s))
        except dist.DistStoreError:
            return None
        if (found := self.agreed(key)) is None:  # what lies there counts as not written
            time.sleep(max(0.0, deadline_s - time.monotonic()))
        return found

    def _opened(self, key: str, text: bytes) -> Any:
        try:
            return self._seal.open(key, text)
        except BrokenSealError:
            return None


def _numbers(runs: list[list[int]] | None) -> list[int] | None:
    return None if runs is None else numbers_of(runs)


def _end_key(process: int) -> str:
    return f"{_ENDS}/{process}"


def _key(number: int, name: str) -> str:
    return f"moevement/roll{number}/{name}"
