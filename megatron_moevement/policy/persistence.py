"""Persistence: which sparse checkpoint the whole job can recover from."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.schedule import Window


@dataclasses.dataclass(frozen=True, order=True)
class SlotKey:
    """One slot of one logical rank: what is copied, acknowledged and loaded as a whole.

    Attributes:
        owner: the logical rank whose state it holds, whoever keeps it.
        window: the window that it is part of.
        slot: its place in the window; it holds the owner's part of S_(window.start + slot).
    """

    owner: LogicalRank
    window: Window
    slot: int

    @property
    def step(self) -> int:
        """The step k whose state S_k the slot holds."""
        return self.window.step_of(self.slot)


@dataclasses.dataclass(frozen=True)
class Acknowledgements:
    """What one logical rank knows of the copies of its own slots.

    Each change returns a new value; the rank's training thread reads one at the commit barrier.

    Attributes:
        owing: for each slot that has landed in the rank's host memory, the processes that have
            not yet acknowledged their copy.
    """

    owing: Mapping[SlotKey, frozenset[int]] = dataclasses.field(default_factory=dict)

    def landed(self, slot: SlotKey, holders: Iterable[int]) -> Acknowledgements:
        """Returns the state after a slot has landed and is on its way to its holders.

        A slot that a replay captures again starts anew: its former copies are not relied on.
        """
        return Acknowledgements({**self.owing, slot: frozenset(holders)})

    def acknowledged(self, slot: SlotKey, process: int) -> Acknowledgements:
        """Returns the state after a process has confirmed its copy; unknown slots are ignored.

        An acknowledgement may arrive after its slot was dropped or its holder replaced.
        """
        owing = self.owing.get(slot)
        if owing is None or process not in owing:
            return self
        return Acknowledgements({**self.owing, slot: owing - {process}})

    def holder_replaced(
        self, former: int, successor: int | None, slots: Iterable[SlotKey]
    ) -> Acknowledgements:
        """Returns the state after a process took over the copies that another one was to keep.

        Args:
            former: the process that is lost or silent.
            successor: the process that keeps the copies from now on, None where nobody can.
            slots: the slots that go to the successor, those that `former` had confirmed included.
        """
        owing = {slot: processes - {former} for slot, processes in self.owing.items()}
        if successor is not None:
            for slot in slots:
                if slot in owing:
                    owing[slot] |= {successor}
        return Acknowledgements(owing)

    def dropped_before(self, window: Window) -> Acknowledgements:
        """Returns the state without the slots of windows older than `window`."""
        return Acknowledgements(
            {slot: owing for slot, owing in self.owing.items() if slot.window >= window}
        )

    def is_complete(self, window: Window) -> bool:
        """Returns whether every slot of a window has landed and has all its acknowledgements."""
        done = sum(slot.window == window and not owing for slot, owing in self.owing.items())
        return done == window.size

    def has_second_holder(self, window: Window, holders: Collection[int]) -> bool:
        """Returns whether every slot of a window has landed and has a copy, if it can have one.

        Args:
            window: which one.
            holders: the processes that are to keep copies.
        """
        safe = sum(
            slot.window == window and (not owing or not owing.issuperset(holders))
            for slot, owing in self.owing.items()
        )
        return safe == window.size

    def owed_copies(self) -> int:
        """Returns how many copies of slots are on their way."""
        return sum(len(owing) for owing in self.owing.values())

    def newest_complete(self) -> Window | None:
        """Returns the newest complete window that no incomplete one precedes.

        A rank reports this window at the commit barrier. Older windows that it still keeps are
        then complete too, which makes the minimum over ranks complete everywhere.
        """
        newest = None
        for window in sorted({slot.window for slot in self.owing}):
            if not self.is_complete(window):
                break
            newest = window
        return newest


def persisted_window(
    reported: Mapping[LogicalRank, Window | None], ranks: Iterable[LogicalRank]
) -> Window | None:
    """Returns the newest window that is persisted, a property of the job.

    A window is persisted when every logical rank's every slot of it has all its acknowledgements.
    No rank may take this decision from its own acknowledgements: ranks that drop the previous
    window at different steps leave nothing that all can recover from. Source: section 3.2.

    Args:
        reported: for each logical rank the window that `newest_complete` gave at the same step.
        ranks: all logical ranks of the job.

    Returns:
        The oldest of the reported windows; None while a rank has reported none.
    """
    oldest: Window | None = None
    for rank in ranks:
        window = reported.get(rank)
        if window is None:
            return None
        if oldest is None or window < oldest:
            oldest = window
    return oldest
