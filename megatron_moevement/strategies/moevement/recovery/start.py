"""How a generation starts."""

from __future__ import annotations

import dataclasses

from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.strategies.moevement.recovery.executor import MemoryRecovery
from megatron_moevement.strategies.moevement.recovery.rejoin import Returning


@dataclasses.dataclass(frozen=True)
class Start:
    """How a generation starts.

    Attributes:
        recovery: made the plan.
        returning: tells of it.
        plan: None where a launch finds nothing in memory that is newer than what it loads.
    """

    recovery: MemoryRecovery
    returning: Returning
    plan: Plan | None
