# SPDX-License-Identifier: Apache-2.0
"""The newest state of a job: what its processes hold, or what can be loaded or built anew."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.facts.facts import Condition, Facts
from megatron_moevement.policy.recovery.rollforward import newest_committed


@dataclasses.dataclass(frozen=True)
class Durable:
    """The newest durable checkpoints of a job, by their steps; 0 where there is none.

    Attributes:
        loadable: in `--load`, which every launch may go on from.
        saved: in `--save`, saved by this history of training: a launch that begins anew goes on
            from none of them, a job that has trained before does.
    """

    loadable: int = 0
    saved: int = 0

    def newest(self, *, is_continuing: bool) -> int:
        """Returns what a job goes on from that finds nothing in memory."""
        return max(self.loadable, self.saved) if is_continuing else self.loadable


def is_memory_newest(facts: Facts) -> bool:
    """Returns whether a recovery goes on from what the processes hold.

    A checkpoint may get its name while a process dies that takes part in the save. Then both are as
    new; who holds that state keeps it, and does not load it with all others. Where no process lives
    that trains, loading costs no replay.

    Args:
        facts: of the newest history.
    """
    committed = newest_committed(facts.processes)
    if committed is None:
        return False
    if committed != facts.durable:
        return committed > facts.durable
    lives = any(process.live.condition is Condition.DENSE for process in facts.processes)
    # A job that has just begun with this state has no ledger of the step that led to it.
    return lives and any(committed in process.ledger for process in facts.processes)
