"""How far a job is, and what protecting it cost on the way."""

from __future__ import annotations

import dataclasses
from datetime import timedelta


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
class IterationCosts:
    """What fault tolerance cost in one iteration, on this rank.

    Attributes:
        stall: time that training waited for captures.
        captured_bytes: of tensors, copied to the host.
        metadata_bytes: scalars that lie beside them in the slot, as JSON.
        host_bytes: host memory in use by snapshots and logs.
    """

    stall: timedelta = timedelta()
    captured_bytes: int = 0
    replicated_bytes: int = 0
    log_bytes: int = 0
    host_bytes: int = 0
    metadata_bytes: int = 0


NO_COSTS = IterationCosts()
