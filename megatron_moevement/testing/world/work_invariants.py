"""Invariant of lost work: what enough failure domains still keep is never done again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.violations import require

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


@dataclasses.dataclass
class History:
    """What a history of training has come to.

    Attributes:
        steps: the newest step that each rank committed.
        window: the newest persisted window.
        domains: failure domains that keep each slot of it.
        since: the time from which a loss takes one of them.
    """

    steps: dict[LogicalRank, int] = dataclasses.field(default_factory=dict)
    window: Window | None = None
    domains: int = 0
    since: float = 0.0


class WorkInvariants:
    """Counts failure domains that are lost, and watches that no step is lost with too few."""

    def __init__(self, world: World) -> None:
        """Watches a world from its start."""
        self._world = world
        self._lost: list[tuple[float, str]] = []
        self._voted: dict[LogicalRank, float] = {}
        self._histories: dict[int, History] = {}

    def lost(self, domain: str) -> None:
        """Notes that memory in a failure domain is lost, or no longer what it was."""
        self._lost.append((self._world.clock.now, domain))

    def votes(self, process: Process) -> None:
        """Notes when a rank says which of its slots have their copies."""
        self._voted[process.place] = self._world.clock.now

    def committed(self, process: Process) -> None:
        """Notes a step that a rank has committed."""
        rank, steps = process.place, self._history(process).steps
        steps[rank] = max(process.store.committed or 0, steps.get(rank, 0))

    def learnt(self, process: Process, copies: int) -> None:
        """Notes that a window is persisted, with so many copies of each slot besides the own."""
        history, window = self._history(process), process.store.persisted
        if history.window is None or (window is not None and history.window < window):
            history.window, history.domains = window, copies + 1
            history.since = min(self._voted.values())

    def restarts_windows(self, rollbacks: int) -> None:
        """Notes that the windows of a history are given up, and its states go on."""
        history = self._histories.setdefault(rollbacks, History())
        history.window = None

    def goes_back(self, plan: Plan) -> None:
        """7: a job that goes back loses no step while a domain keeps the persisted window."""
        history = self._histories[max(self._histories)] if self._histories else History()
        ranks = self._world.shape.layout.num_ranks
        if history.window is None or len(history.steps) < ranks:
            return
        gone = {domain for time, domain in self._lost if time >= history.since}
        step = min(history.steps.values())
        what = f"the job goes back to step {plan.target} from {step}, lost are {sorted(gone)}"
        lost_work = plan.target < step and len(gone) < history.domains
        require(not lost_work, "7 lost work", what, "of", history.domains, "domains")

    def _history(self, process: Process) -> History:
        return self._histories.setdefault(process.store.rollbacks, History())
