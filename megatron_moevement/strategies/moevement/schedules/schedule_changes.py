# SPDX-License-Identifier: Apache-2.0
"""Changes of the window schedule: what a rank proposes, votes for, and goes by."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megatron_moevement.policy.facts.facts import Facts
from megatron_moevement.policy.recovery.plan import Plan
from megatron_moevement.policy.watching.measurements import Reduced
from megatron_moevement.policy.watching.schedule_maker import ScheduleMaker, noted
from megatron_moevement.policy.watching.window_choice import ends_trial
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.schedule_document import decode_schedule
from megatron_moevement.policy.window.timetable import (
    Proposal,
    Timetable,
    UnknownScheduleError,
    agreed_version,
    announced_version,
    due_change,
    may_propose,
    schedule_vote,
)
from megatron_moevement.policy.window.weight_gradients import ExpertKernels
from megatron_moevement.runtime.coordination.agreement import broadcast_json
from megatron_moevement.runtime.observation.cpu_times import CpuShare
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory
from megatron_moevement.strategies.moevement.schedules.exchange import Proposed, ScheduleExchange
from megatron_moevement.strategies.moevement.schedules.popularity_watch import PopularityWatch
from megatron_moevement.strategies.moevement.schedules.window_chooser import WindowChooser
from megatron_moevement.strategies.moevement.window_history import WindowHistory

logger = logging.getLogger(__name__)


class ScheduleChanges:
    """The schedules of one rank in one generation; its training thread uses it."""

    def __init__(
        self,
        memory: HostMemory,
        settings: FaultTolerance,
        events: Events,
        notices: Notices,
        *,
        popularity: PopularityWatch,
        kernels: ExpertKernels,
    ) -> None:
        """Knows the schedule that all ranks have planned, and asks nobody yet.

        Args:
            settings: have the changes of the schedule that are wanted, or let W be chosen.
            events: gets a schedule that all ranks have agreed on.
            notices: lines for the user, printed on one rank.
            popularity: what the job knows of its experts.
            kernels: that compute them.
        """
        planned = memory.plan.schedule
        self._memory = memory
        self._changes = settings.changes
        self._maker = ScheduleMaker(planned, settings.windows, memory.plan.room, kernels)
        self._chooser: WindowChooser | None = None
        if settings.chooses_window:
            replicas = memory.plan.placement.replicas
            self._chooser = WindowChooser(self._maker.sizes, replicas, events, notices)
        self.popularity = popularity
        """What experts are ordered by."""
        self._events = events
        self._notices = notices
        self._known = {planned.digest: planned}
        self._exchange = memory.generation.own(
            lambda: ScheduleExchange(memory.rejoin_barrier, planned.inventory)
        )
        self._announced = 0
        self._settled: tuple[int, tuple[int, ...], str] | None = None

    def cpu_share(self) -> CpuShare | None:
        """Returns a meter of CPU times, where W is chosen by them, too."""
        return None if self._chooser is None else CpuShare()

    def learn(self, facts: Facts, plan: Plan, device: torch.device) -> None:
        """Takes the schedules that a plan goes on with from who has them; every rank calls it.

        Raises:
            UnknownScheduleError: nobody has one of them.
        """
        timetable, source = plan.schedules
        memory = self._memory
        wanted = frozenset[str]() if timetable is None else timetable.digests()
        wanted -= {memory.plan.schedule.digest}
        if not wanted:
            return
        journal = memory.store.open_journal()
        stored = {} if journal is None else journal.schedules()
        ranks = [facts.by_rank[rank] for rank in facts.layout.ranks]
        if any(each.timetable is None or not wanted <= each.timetable.digests() for each in ranks):
            speaker = next((n for n, each in enumerate(ranks) if each.process == source), 0)
            if source is not None and source != memory.host.process and dist.get_rank() == speaker:
                stored = dict(memory.schedules_of_spare(source))
            own = {digest: stored[digest].hex() for digest in sorted(wanted & stored.keys())}
            told = broadcast_json(own, speaker, device)
            stored = {digest: bytes.fromhex(text) for digest, text in told.items()}
        if lacking := wanted - stored.keys():
            raise UnknownScheduleError(f"no process has the window schedule {min(lacking)}")
        inventory = memory.plan.schedule.inventory
        for digest in sorted(wanted):
            self._known[digest] = decode_schedule(stored[digest], inventory, digest)

    def history(
        self, timetable: Timetable, rollbacks: int, persisted: Window | None
    ) -> WindowHistory:
        """Returns the history of windows that go on by a timetable."""
        schedules = {digest: self._known[digest] for digest in timetable.digests()}
        return WindowHistory(timetable, schedules, rollbacks, persisted)

    def begun(self, plan: Plan | None, step: int, rollbacks: int) -> WindowHistory:
        """Returns the history of windows that begin at a step, under the newest schedule."""
        timetable = None if plan is None else plan.schedules.timetable
        if timetable is None:
            return WindowHistory.begun(self._memory.plan.schedule, step, rollbacks)
        newest = timetable.newest._replace(first_step=step)
        return self.history(Timetable((newest,), newest.schedule_version), rollbacks, None)

    def vote(self, history: WindowHistory, *, is_replay: bool) -> tuple[int, int]:
        """Returns what this rank brings to the barrier; a replay decides nothing again."""
        proposed = None if is_replay else self._exchange.proposed
        return schedule_vote(history.timetable, None if proposed is None else proposed.proposal)

    def agreed(self, history: WindowHistory, greatest: tuple[int, int]) -> Proposed | None:
        """Returns the schedule that all ranks have just agreed on, if it is another one.

        Args:
            greatest: what the barrier found, number by number.
        """
        self._announced = announced_version(greatest)
        version, proposed = agreed_version(greatest), self._exchange.proposed
        if version is None or version <= history.timetable.newest.schedule_version:
            return None
        if proposed is None or proposed.proposal.schedule_version != version:
            raise UnknownScheduleError(f"this rank has not voted for the schedule {version}")
        return proposed

    def tell(self, history: WindowHistory) -> None:
        """Reports the schedule that all ranks have just agreed on."""
        newest = history.timetable.newest
        self._events.emit(
            EventName.SCHEDULE,
            history.step,
            version=newest.schedule_version,
            first_step=newest.first_step,
            window=newest.window,
            digest=newest.digest,
        )
        self._notices.say(
            f"step {history.step}: window schedule {newest.schedule_version} is in force from "
            f"step {newest.first_step} on, W = {newest.window}"
        )

    def after_step(self, history: WindowHistory) -> None:
        """Sees to it that what is wanted, or proposed by another rank, comes to all."""
        newest, step = history.timetable.newest, history.step
        proposed, version = self._exchange.proposed, newest.schedule_version + 1
        is_here = proposed is not None and proposed.proposal.schedule_version == version
        kept_from = step - self._memory.own_ring.capacity
        if is_here or not may_propose(history.timetable, step, kept_from):
            if self._chooser is not None:
                self._chooser.forget()
            return
        if dist.get_rank() == 0:
            self._propose(history, version)
        elif self._announced == version:
            self._exchange.fetch(version)

    def measured(self, history: WindowHistory, greatest: Reduced) -> None:
        """Notes what all ranks have measured until a step.

        Args:
            greatest: what the barrier found, number by number.
        """
        news = noted(history.timetable, history.step, greatest)
        if self._chooser is not None and news is not None:
            self._chooser.note(news)

    def _propose(self, history: WindowHistory, version: int) -> None:
        newest, maker, known = history.timetable.newest, self._maker, self.popularity.known
        chooser, fixed, in_force = self._chooser, newest.window, history.schedules[newest.digest]
        if chooser is None:
            due = due_change([change.step for change in self._changes], history.step)
            if due is None:
                return
            fixed = self._changes[due].window
        wanted = (fixed, known.ordered_by, newest.digest)
        if wanted == self._settled and (chooser is None or not chooser.has_news):
            return

        def make() -> Proposed | None:
            window, used, decision = fixed, None, None
            if chooser is not None and fixed not in maker.windows:
                window = maker.planned.window  # a former launch might replay more steps
            elif chooser is not None:
                window, used = chooser.choose(fixed, maker.used_of(in_force), newest.decision)
                decision = chooser.decision(newest.decision)
            schedule = maker.wanted(window, known, used, after=in_force)
            is_next = maker.may_follow(schedule, in_force)
            if is_next or ends_trial(newest.decision, decision):
                following = schedule if is_next else in_force
                return Proposed(Proposal(version, following.digest, decision), following)
            self._settled = wanted
            if schedule.digest != newest.digest:
                logger.warning(
                    "the window stays at %d: slots of one of %d are larger than "
                    "--moevement-min-window %d allows",
                    *(newest.window, window, maker.windows.start),
                )
            return None

        self._exchange.propose(version, make)
