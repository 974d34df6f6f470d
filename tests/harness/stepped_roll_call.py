# SPDX-License-Identifier: Apache-2.0
"""Processes that call the roll one look at a time, on a clock of their own: no threads, no ranks.

So it is certain what many processes do between two questions of one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

from megatron_moevement.policy.watching.short_lists import ENTRIES, by_list
from megatron_moevement.runtime.coordination import attendance, elected_reader, roll_call
from megatron_moevement.runtime.coordination.roll_call import RollCall
from megatron_moevement.settings.secret import Secret
from tests.harness.counting_store import CountingStore, SharedKeys

SECRET = Secret(b"s" * 64)
PATIENCE = timedelta(days=1)
ALL_LOOK_S = 60.0
"""In which a look of each process falls due."""


class Clock:
    """What the processes take for the time of day."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        """Returns the time."""
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        """Lets time pass."""
        self.now_s += duration_s

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Has all processes look at this clock."""
        with contextlib.ExitStack() as patches:
            for module in (roll_call, attendance, elected_reader):
                patches.enter_context(mock.patch.object(module, "time", self))
            yield


class InterruptedStore(CountingStore):
    """A connection between two questions of which something happens, once."""

    def __init__(self, keys: SharedKeys) -> None:
        super().__init__(keys)
        self.before: dict[str, Callable[[], None]] = {}
        """By the end of the key that is asked for."""

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there, after what is to happen before."""
        for ending in [each for each in self.before if keys[0].endswith(each)]:
            self.before.pop(ending)()
        return super().check(keys)


class SteppedProcess:
    """One process: what it does in `RollCall.call`, apart from waiting."""

    def __init__(self, keys: SharedKeys, process: int, processes: int) -> None:
        self.store = InterruptedStore(keys)
        self.roll = RollCall(process, processes, secret=SECRET, attempt="0", patience=PATIENCE)
        self.called: Any = None

    def come(self) -> None:
        """Comes, and looks for the first time."""
        self._here = self.roll.begin(self.store)
        self.called = self.roll.called(self.store)
        self.look()

    def look(self) -> None:
        """Looks when its time to wait is over."""
        self.called = self.roll.look(self.store, self._here)

    def wake(self) -> None:
        """Reads who is called, where that has ended its wait."""
        self.called = self.called or self.roll.called(self.store)


class SteppedRollCall:
    """All processes of a job, of which the last one reads all lists.

    Attributes:
        waiting: all but the last.
        in_the_middle: what that one asks for when it has read half of the lists.
    """

    def __init__(self, processes: int) -> None:
        self.clock = Clock()
        self.keys = SharedKeys()
        self.members = [SteppedProcess(self.keys, one, processes) for one in range(processes)]
        *self.waiting, self.last = self.members
        self.in_the_middle = f"/here:0.{len(by_list(range(processes))) // 2}"

    def come(self) -> None:
        """Has all come but the last, one after the other."""
        for member in self.waiting:
            member.come()

    def look(self, after_s: float = ALL_LOOK_S) -> None:
        """Has all look that wait, as where their looks fall due at the same time."""
        self.clock.now_s += after_s
        for member in self.waiting:
            member.look()

    def meet(self) -> None:
        """Has all come, and all others look while the last one reads."""
        with self.clock.ticking():
            self.come()
            before = self.last.store.before
            before["/here_reader0"] = lambda: before.update({self.in_the_middle: self.look})
            self.last.come()
            for member in self.members:
                member.wake()

    def requests(self) -> list[int]:
        """Returns how many each process has asked."""
        return [member.store.load.requests.total() for member in self.members]

    def readers(self, name: str = "here") -> list[int]:
        """Returns which processes have read all lists of a name."""
        ends = [f"{name}:0.{number}" for number in range(1, len(self.members) // ENTRIES)]
        reads = [" ".join(member.store.load.read) + " " for member in self.members]
        return [one for one, read in enumerate(reads) if all(f"{end} " in read for end in ends)]
