# SPDX-License-Identifier: Apache-2.0
"""Session of a rank: what one rank works with in one generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.outcome.account import RecoveryAccount
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.observation.events import Events
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.carried_state import CarriedState
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory
from megatron_moevement.strategies.moevement.schedules.schedule_changes import ScheduleChanges
from megatron_moevement.strategies.moevement.tiers.tiers import Tiers


@dataclasses.dataclass(frozen=True)
class RankSession:
    """What one rank works with in one generation; its training thread uses it.

    Attributes:
        memory: this process's store, and its peers.
        events: gets windows, plans and replays.
        schedules: that windows go by.
        notices: lines for the user, printed on rank 0.
        recovered: is given each recovery, on every rank.
        tiers: to which persisted windows are written; None where no flag asks for any.
    """

    objects: LiveObjects
    live: LiveOperators
    memory: HostMemory
    carried: CarriedState
    events: Events
    schedules: ScheduleChanges
    notices: Notices
    recovered: Callable[[RecoveryAccount], None]
    tiers: Tiers | None = None

    @property
    def generation(self) -> Generation:
        """The generation."""
        return self.memory.generation

    def with_loaded_tensors(self) -> RankSession:
        """Returns the same after a durable checkpoint was loaded, which brings new tensors."""
        live = LiveOperators(self.objects.chunks, self.objects.optimizer)
        return dataclasses.replace(self, live=live)
