# SPDX-License-Identifier: Apache-2.0
"""Futility: when another restart would not help, since none before it did.

Pure: what each process knows of progress goes in, and all come to the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from megatron_moevement.errors import MoEvementError

RESTARTS_IN_VAIN = 10
"""Restarts that lost no process and committed no step: the next would fail too."""
RESTARTS_WITHOUT_MEETING = 30
"""Restarts after which a process gives up by itself: no generation came so far that all met."""


class InVainError(MoEvementError):
    """Restarts lead nowhere: all processes find it, and the job stops before another one."""


@dataclasses.dataclass(frozen=True)
class Futility:
    """What a process knows of the progress of the job.

    Attributes:
        committed: the newest step that any process knew of when all met last; -1: they never did.
        processes: how many there were then, spares included.
        in_vain: restarts in a row since the last one that came after a new step or a loss.
    """

    committed: int = -1
    processes: int = 0
    in_vain: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the job had better stop."""
        return self.in_vain >= RESTARTS_IN_VAIN

    def document(self) -> list[int]:
        """Returns it as JSON."""
        return [self.committed, self.processes, self.in_vain]

    @classmethod
    def agreed(
        cls, told: Iterable[Sequence[int]], committed: Iterable[int], processes: int
    ) -> Futility:
        """Returns what all processes know from now on, those that came in new as well.

        Args:
            told: what each knew, as JSON; the same needs to be told once.
            committed: the newest step that each knows of now.
        """
        before = cls(*(max(values) for values in zip(*told, strict=True)))
        newest = max(*committed, before.committed)
        is_vain = (newest, processes) == (before.committed, before.processes)
        return cls(newest, processes, before.in_vain + 1 if is_vain else 0)
