# SPDX-License-Identifier: Apache-2.0
"""Persistence: which sparse checkpoint the whole job can recover from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window


class SlotKey(NamedTuple):
    """One slot of one logical rank: what is copied, acknowledged and loaded as a whole.

    Attributes:
        owner: the logical rank whose state it holds, whoever keeps it.
        slot: its place in the window; it holds the owner's part of S_(window.start + slot).
    """

    owner: LogicalRank
    window: Window
    slot: int

    @property
    def step(self) -> int:
        """The step k whose state S_k the slot holds."""
        return self.window.step_of(self.slot)


def slot_keys(owner: LogicalRank, window: Window, slots: int) -> tuple[SlotKey, ...]:
    """Returns the slots of a window of which a bit is set, by step."""
    return tuple(SlotKey(owner, window, j) for j in range(window.size) if slots >> j & 1)


@dataclasses.dataclass(frozen=True)
class Acknowledgements:
    """What one logical rank knows of the copies of its own slots.

    Each change returns a new value; the rank's training thread reads one at the commit barrier.

    Attributes:
        owing: for each slot that has landed in the rank's host memory, the processes that have
            not yet acknowledged their copy.
        held: for each of these slots the processes that keep a copy.
        excused: processes whose copies are not waited for, because transfers to them have failed
            for long and no other process can take their place. They go on owing them.
    """

    owing: Mapping[SlotKey, frozenset[int]] = dataclasses.field(default_factory=dict)
    held: Mapping[SlotKey, frozenset[int]] = dataclasses.field(default_factory=dict)
    excused: frozenset[int] = frozenset()

    def landed(
        self, slot: SlotKey, holders: Iterable[int], held: Iterable[int] = ()
    ) -> Acknowledgements:
        """Returns the state after a slot has landed and is on its way to its holders.

        A slot that a replay captures again starts anew: its former copies are not relied on.

        Args:
            holders: the processes that are to keep a copy and lack it.
            held: the processes that keep one already.
        """
        return dataclasses.replace(
            self,
            owing={**self.owing, slot: frozenset(holders)},
            held={**self.held, slot: frozenset(held)},
        )

    def acknowledged(self, slot: SlotKey, process: int) -> Acknowledgements:
        """Returns the state after a process has confirmed its copy; unknown slots are ignored.

        An acknowledgement may arrive after its slot was dropped or its holder replaced. Whoever
        confirms a copy is excused no more.
        """
        owing = self.owing.get(slot)
        if owing is None or process not in owing:
            return self
        return dataclasses.replace(
            self,
            owing={**self.owing, slot: owing - {process}},
            held={**self.held, slot: self.held[slot] | {process}},
            excused=self.excused - {process},
        )

    def holder_replaced(
        self, former: int, successor: int, slots: Iterable[SlotKey]
    ) -> Acknowledgements:
        """Returns the state after a process took over the copies that another one was to keep.

        Args:
            slots: the slots that go to the successor, those that `former` had confirmed included.
        """
        owing = {slot: processes - {former} for slot, processes in self.owing.items()}
        held = {slot: processes - {former} for slot, processes in self.held.items()}
        for slot in slots:
            if slot in owing and successor not in held[slot]:
                owing[slot] |= {successor}
        return dataclasses.replace(self, owing=owing, held=held, excused=self.excused - {former})

    def holder_excused(self, process: int) -> Acknowledgements:
        """Returns the state after a process was found silent whose place nobody can take.

        Slots that another process keeps are complete without it; a slot of which it was to keep
        the only copy is not complete before somebody keeps one.
        """
        return dataclasses.replace(self, excused=self.excused | {process})

    def dropped_before(self, window: Window) -> Acknowledgements:
        """Returns the state without the slots of windows older than `window`."""
        return dataclasses.replace(
            self,
            owing={slot: owing for slot, owing in self.owing.items() if slot.window >= window},
            held={slot: held for slot, held in self.held.items() if slot.window >= window},
        )

    def lost_of(self, damaged: Collection[SlotKey]) -> tuple[SlotKey, ...]:
        """Returns which of some damaged slots are still needed: they can't be copied any more.

        No window with such a slot is ever complete: the generation must not go on.

        Args:
            damaged: slots of this rank that are damaged in its own memory.
        """
        return tuple(sorted(slot for slot in damaged if slot in self.owing))

    def is_complete(self, window: Window) -> bool:
        """Returns whether every slot of a window has landed and has the copies it can have."""
        done = sum(slot.window == window and self._has_its_copies(slot) for slot in self.owing)
        return done == window.size

    def _has_its_copies(self, slot: SlotKey) -> bool:
        owing = self.owing[slot]
        return not owing or (owing <= self.excused and bool(self.held[slot]))

    def has_second_holder(self, window: Window) -> bool:
        """Returns whether every slot of a window has landed and has a copy, if it can have one.

        So has one that was dropped: it is needed no more, since a newer window is persisted. A
        replay that captures the slots of that window again may bring it about.
        """
        if self.owing and all(slot.window > window for slot in self.owing):
            return True
        safe = sum(
            slot.window == window and (not owing or bool(self.held[slot]))
            for slot, owing in self.owing.items()
        )
        return safe == window.size

    def owed_copies(self) -> int:
        """Returns how many copies of slots are on their way."""
        return sum(len(owing) for owing in self.owing.values())

    def fewest_copies(self, persisted: Window | None = None) -> int:
        """Returns the fewest copies of a slot of the complete windows, the rank's own not counted.

        Args:
            persisted: only newer windows count, where there are any that are complete.
        """
        complete = self._complete_windows()
        newer = [window for window in complete if persisted is None or window > persisted]
        counted = newer or complete[-1:]
        return min(
            (len(self.held[slot]) for slot in self.held if slot.window in counted), default=0
        )

    def newest_complete(self) -> Window | None:
        """Returns the newest complete window that no incomplete one precedes.

        A rank reports this window at the commit barrier. Older windows that it still keeps are
        then complete too, which makes the minimum over ranks complete everywhere.
        """
        return next(reversed(self._complete_windows()), None)

    def _complete_windows(self) -> list[Window]:
        """Returns the complete windows that no incomplete one precedes, ascending."""
        windows = sorted({slot.window for slot in self.owing})
        return list(itertools.takewhile(self.is_complete, windows))
