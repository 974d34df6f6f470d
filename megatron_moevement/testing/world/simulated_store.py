# SPDX-License-Identifier: Apache-2.0
"""The store of a simulated process: what outlives a restart, and with shared memory the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.slot_ring import Extent
from megatron_moevement.policy.facts.facts import Holding, LogExtent
from megatron_moevement.policy.job.boundary import BoundaryTag, Direction
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.policy.window.schedule import Window, WindowSchedule
from megatron_moevement.policy.window.timetable import Timetable
from megatron_moevement.testing.world.arithmetic import Entry
from megatron_moevement.testing.world.live import SlotContent
from megatron_moevement.testing.world.shape import Shape


@dataclasses.dataclass
class StoredSlot:
    """A slot in host memory; `intact` is what its checksum says.

    Attributes:
        extent: where it lies in its owner's ring and in those of the holders.
    """

    content: SlotContent
    extent: Extent
    intact: bool = True


@dataclasses.dataclass
class LoggedTensor:
    """A logged boundary tensor; it counts from the time at which its copy has landed."""

    value: int
    landed_at: float
    intact: bool = True


@dataclasses.dataclass
class Store:
    """Host memory of a process.

    Attributes:
        slots: its rank's own slots and those it keeps for others.
        logs: for each step what its rank sent, by the name it was logged under.
        ledger: ledger entries.
        losses: loss of every step so far.
        committed: newest step known to be committed.
        persisted: newest window known to be persisted.
        rollbacks: how many rollbacks lie behind it.
        rank: of the process that wrote its journal.
        timetable: the window schedules that it knows to be agreed on.
        schedules: those of them that not every process makes alike, by their digests.
    """

    slots: dict[SlotKey, StoredSlot] = dataclasses.field(default_factory=dict)
    logs: dict[int, dict[BoundaryTag, LoggedTensor]] = dataclasses.field(default_factory=dict)
    ledger: dict[int, Entry] = dataclasses.field(default_factory=dict)
    losses: dict[int, int] = dataclasses.field(default_factory=dict)
    committed: int | None = None
    persisted: Window | None = None
    rollbacks: int = 0
    rank: LogicalRank | None = None
    timetable: Timetable | None = None
    schedules: Mapping[str, WindowSchedule] = dataclasses.field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nobody could go on from it."""
        return self.committed is None and not self.slots

    def copy(self) -> Store:
        """Returns an independent copy; what was logged is in no file."""
        return dataclasses.replace(
            self,
            slots={key: dataclasses.replace(stored) for key, stored in self.slots.items()},
            logs={},
            ledger=dict(self.ledger),
            losses=dict(self.losses),
        )

    def holdings(self) -> tuple[Holding, ...]:
        """Returns which intact slots are there, by owner and window."""
        found: dict[tuple[LogicalRank, Window], int] = {}
        for key, stored in self.slots.items():
            if stored.intact:
                whose = (key.owner, key.window)
                found[whose] = found.get(whose, 0) | 1 << key.slot
        return tuple(Holding(owner, window, slots) for (owner, window), slots in found.items())

    def log_extents(self, shape: Shape, stage: int) -> tuple[LogExtent, ...]:
        """Returns which steps are logged whole and intact."""
        return tuple(
            LogExtent(
                direction,
                frozenset(
                    step
                    for step, tensors in self.logs.items()
                    if _count(tensors, direction) == shape.sends(stage, direction)
                ),
            )
            for direction in shape.receivers[stage]
        )

    def ledger_steps(self) -> range:
        """Returns the steps of the ledger that are known to be committed."""
        if not self.ledger or self.committed is None:
            return range(0)
        return range(min(self.ledger), min(max(self.ledger), self.committed) + 1)

    def newest_popularity(self) -> tuple[int, Popularity] | None:
        """Returns the newest step of which the ledger has what is known of the experts, with it."""
        for step in reversed(self.ledger_steps()):
            if step in self.ledger and (known := self.ledger[step].popularity) is not None:
                return step, known
        return None

    def extents(self, owner: LogicalRank) -> dict[int, Extent]:
        """Returns where the slots of a rank lie, by their steps."""
        own = sorted(key for key in self.slots if key.owner == owner)
        return {key.step: self.slots[key].extent for key in own}

    def overwritten_by(self, key: SlotKey, extent: Extent, capacity: int) -> tuple[SlotKey, ...]:
        """Returns the slots of a rank that lie where another one of it is written, or described."""
        return tuple(
            other
            for other, stored in self.slots.items()
            if other != key
            and other.owner == key.owner
            and (stored.extent.overlaps(extent) or (other.step - key.step) % capacity == 0)
        )

    def drop_logs(self, oldest: int) -> None:
        """Forgets what was logged of the steps before this one."""
        self.logs = {step: tensors for step, tensors in self.logs.items() if step >= oldest}

    def bound_ledger(self, capacity: int) -> None:
        """Forgets the oldest entries of the ledger where there are more than it has room for."""
        for step in sorted(self.ledger)[:-capacity]:
            del self.ledger[step]

    def forget_windows(self) -> None:
        """Forgets all windows, and the logs that lead on from them."""
        self.slots.clear()
        self.logs.clear()
        self.persisted = None

    def drop_slots(self, keys: Iterable[SlotKey]) -> None:
        """Forgets slots."""
        for key in list(keys):
            del self.slots[key]

    def drop_unlanded(self, now: float) -> None:
        """Forgets logged tensors whose copies were cut by an interrupt."""
        for tensors in self.logs.values():
            for tag in [tag for tag, logged in tensors.items() if logged.landed_at > now]:
                del tensors[tag]


def _count(tensors: dict[BoundaryTag, LoggedTensor], direction: Direction) -> int:
    return sum(logged.intact and tag.direction is direction for tag, logged in tensors.items())
