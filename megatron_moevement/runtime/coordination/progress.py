# SPDX-License-Identifier: Apache-2.0
"""How far a job is, and what protecting it cost on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far the job is: replaced by one assignment when a step is committed."""

    committed: int
    """k of the newest state S_k."""
    consumed_samples: int
    skipped: int
    """Steps among them that overflowed and changed no weights."""


START = Progress(committed=0, consumed_samples=0, skipped=0)
"""S_0: the initial weights."""


@dataclasses.dataclass(frozen=True)
class Spent:
    """What threads did in one iteration beside the passes, and what training waited for.

    Attributes:
        copy_s: of a slot, to the host.
        hash_s: of a slot's parts.
        send_s: for each process the copies that it acknowledged.
        log_s: of what crosses stage boundaries, copied and hashed; on the CPU by the training
            thread, within the passes.
        await_copy_s: training waited for the slot's copy.
        await_room_s: training waited for acknowledgements, in front of a full ring.
        await_log_s: training waited for the log.
    """

    copy_s: float = 0.0
    hash_s: float = 0.0
    send_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    log_s: float = 0.0
    await_copy_s: float = 0.0
    await_room_s: float = 0.0
    await_log_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Time that training waited for."""
        return self.await_copy_s + self.await_room_s + self.await_log_s


@dataclasses.dataclass(frozen=True)
class IterationCosts:
    """What fault tolerance cost in one iteration, on this rank.

    Attributes:
        captured_bytes: of tensors, copied to the host.
        metadata_bytes: scalars that lie beside them in the slot, as JSON.
        host_bytes: host memory in use by snapshots and logs.
        spent: time, that training waited for included.
    """

    captured_bytes: int = 0
    replicated_bytes: int = 0
    log_bytes: int = 0
    host_bytes: int = 0
    metadata_bytes: int = 0
    spent: Spent = Spent()


NO_COSTS = IterationCosts()
