# SPDX-License-Identifier: Apache-2.0
"""Invariants: what must hold after every tick of a simulated world, whatever goes wrong.

The numbers in the names are those of docs/understand/invariants.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.facts.facts import Condition, Facts, LiveState, ProcessFacts
from megatron_moevement.policy.job.operators import OperatorId, OperatorKind
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.recovery.lifecycle import Phase
from megatron_moevement.policy.recovery.plan import Origin, Plan, Verdict, WindowEdges
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.policy.window.timetable import TimetableEntry
from megatron_moevement.testing.world.live import SlotContent
from megatron_moevement.testing.world.log_invariants import LogInvariants
from megatron_moevement.testing.world.policies import slot_contents
from megatron_moevement.testing.world.process import Process
from megatron_moevement.testing.world.schedule_invariants import ScheduleInvariants
from megatron_moevement.testing.world.source_invariants import has_sources
from megatron_moevement.testing.world.violations import ViolationError, require
from megatron_moevement.testing.world.work_invariants import WorkInvariants

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World


class Invariants:
    """Watches a world; is told what happens and knows nothing from the policies."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._moved: set[int] = set()
        self._judged: set[int] = set()
        self._committed: dict[tuple[int, int], int] = {}
        self._ever_held: dict[SlotKey, set[int]] = {}
        self._persisted: dict[int, Window] = {}  # the newest that any rank has learnt, by era
        self._epochs: dict[int, int] = {}
        self._newest_window: dict[int, Window] = {}
        self._slot_of: dict[tuple[int, Window, OperatorId], int] = {}
        self._window_of: dict[tuple[int, int | None, int], Window] = {}
        self._entries: dict[tuple[int, int], TimetableEntry] = {}
        self._captured_full: dict[tuple[int, Window, LogicalRank, int], frozenset[OperatorId]] = {}
        self.logs = LogInvariants(world)
        self.work = WorkInvariants(world)
        self.schedules = ScheduleInvariants(world)
        self.damaged_slots: set[tuple[int, SlotKey]] = set()

    def tick(self) -> None:
        """Checks what the last tick changed."""
        if not self._moved:
            return
        by_era: dict[int, list[int]] = {}
        for process in self._world.live:
            step = process.store.committed
            if process.live is not None and step is not None:
                by_era.setdefault(process.store.rollbacks, []).append(step)
        for steps in by_era.values():
            require(max(steps) - min(steps) <= 1, "4 committed", "ranks have committed", steps)
        for number in self._moved:
            process = self._world.processes[number]
            if process.alive and process.phase is Phase.TRAINING:
                self.logs.reach_back(process, self._persisted.get(process.store.rollbacks))
        self._moved.clear()

    def committed(self, process: Process) -> None:
        """Checks a rank that has just committed a step, in training or in a replay."""
        store = process.store
        self._moved.add(process.number)
        key = (store.rollbacks, process.number)
        assert store.committed is not None
        former = self._committed.get(key, 0)
        require(store.committed >= former, "4 committed", process, "went back from", former)
        self._committed[key] = store.committed
        self.work.committed(process)
        beyond = process.live is not None and process.live.step > store.committed
        require(not beyond, "4 recorded", process, "is beyond", store.committed, "of its journal")
        self._equals_reference(process)
        if process.phase is Phase.TRAINING:
            self.logs.landed(process)

    def _equals_reference(self, process: Process) -> None:
        live = process.state
        expected = self._world.reference.state(live.step, process.place)
        history = self._world.history
        for operator, full in live.active.items():
            if full != expected.active[operator]:
                found, wanted = map(history.explain, (full, expected.active[operator]))
                what = f"{process} has {operator} = {found} after step {live.step}"
                raise ViolationError("6 same bits", f"{what}, expected {wanted}")
            if operator.kind is OperatorKind.GATE:
                same = live.bias[operator] == expected.bias[operator]
                require(same, "6 same bits", process, "has another expert_bias at", live.step)
        same = (live.scalers, live.cursor) == (expected.scalers, expected.cursor)
        require(same, "6 same bits", process, "has other scalars after step", live.step)
        if live.step > 0 and live.step in process.store.losses:
            same = process.store.losses[live.step] == self._world.reference.entry(live.step).loss
            require(same, "6 same bits", process, "has another loss of step", live.step)

    def captured(self, process: Process, key: SlotKey, content: SlotContent) -> None:
        """Checks a snapshot that is being taken."""
        rollbacks, window = process.store.rollbacks, key.window
        newest = self._newest_window.get(rollbacks)
        if newest is None or newest < window:
            follows = newest is None or window.start == newest.last + 1
            require(follows, "8 window edges", process, "captures", window, "after", newest)
            self._newest_window[rollbacks] = window
        for operator, full in content.full.items():
            slot = self._slot_of.setdefault((rollbacks, window, operator), key.slot)
            what = (process, "captures", operator, "in slot", key.slot, "and another in slot", slot)
            require(slot == key.slot, "2b same slot", *what)
            expected = self._world.reference.state(key.step, key.owner).active[operator]
            require(full == expected, "6 same bits", process, "captures a wrong", operator)
        one = self._window_of.setdefault((rollbacks, self._epochs.get(rollbacks), key.step), window)
        told = f"{process} captures step {key.step} in {window}, another rank in {one}"
        require(window == one, "2b same slot", told)
        schedule = process.schedule(process.timetable.at(key.step))
        truth = slot_contents(schedule, key.owner, key.slot)
        captured = (frozenset(content.full), frozenset(content.compute))
        self._captured_full[rollbacks, window, key.owner, key.slot] = captured[0]
        require(captured == truth, "1 slots", process, "captures wrong operators in slot", key.slot)
        self.schedules.has_room(process, key, content)

    def adopted(self, process: Process, entry: TimetableEntry) -> None:
        """Checks that a version stands for one schedule, from one step on, on all ranks."""
        named = (process.store.rollbacks, entry.schedule_version)
        one = self._entries.setdefault(named, entry)
        if entry not in self._world.outcome.schedules:
            self._world.outcome.schedules.append(entry)
        require(entry == one, "2b same slot", process, "goes by", entry, "and another rank by", one)

    def _forget_entries(self, facts: Facts) -> None:
        """Forgets schedules that only the dead had agreed on: they are decided again."""
        there = [one.timetable.newest for one in facts.processes if one.timetable is not None]
        newest = max((entry.schedule_version for entry in there), default=-1)
        for named in [named for named in self._entries if named[1] > newest]:
            del self._entries[named]

    def put_back(
        self, process: Process, window: Window, slot: int, full: frozenset[OperatorId]
    ) -> None:
        """Checks that a slot is read as it was written."""
        key = (process.store.rollbacks, window, process.place, slot)
        written = self._captured_full[key]
        what = (process, "reads slot", slot, "of", window, "as if it held", sorted(full))
        require(full == written, "1 slots", *what)

    def landed(self, process: Process, key: SlotKey, content: SlotContent) -> None:
        """Checks that a snapshot is the state of its step, not of one that overwrote it."""
        expected = self._world.reference.state(key.step, key.owner)
        for operator, full in content.full.items():
            same = full == expected.active[operator]
            require(same, "6 same bits", process, "captured", operator, "while it changed")

    def stored(self, process: Process, key: SlotKey) -> None:
        """Checks the memory of a process that has just got a slot, and remembers that it has it."""
        self._ever_held.setdefault(key, set()).add(process.number)
        if process.store.slots[key].intact:
            self.damaged_slots.discard((process.number, key))
        else:
            self.damaged_slots.add((process.number, key))
        count = sum(other.owner == key.owner for other in process.store.slots)
        capacity = self._world.scenario.ring_capacity
        require(count <= capacity, "3 memory", process, "has", count, "slots of", key.owner)

    def placed(self, owner: Process, members: Iterable[int]) -> None:
        """Checks who is to keep the copies of a rank: no failure takes two of r + 1."""
        processes = self._world.processes
        domains = [processes[number].domain for number in (owner.number, *owner.holders)]
        there = {processes[number].domain for number in members}
        wanted = min(self._world.scenario.replicas + 1, len(there))
        require(
            len(domains) == len(set(domains)) == wanted,
            "2 domains",
            f"{owner} has its slots at {domains}, wanted are {wanted} failure domains",
        )
        self.schedules.placed(owner)

    def acknowledged(self, owner: Process, key: SlotKey, holder: int) -> None:
        """Checks that an acknowledgement speaks of a copy that is there."""
        there = self._has(holder, key) or owner.ring.oldest > key.step
        require(there, "2 copies", f"p{holder} acknowledged", key, "to", owner, "and lacks it")

    def learnt(self, process: Process, claimed: int) -> None:
        """Checks that a window which a rank takes for persisted is so for the whole job.

        It learns as well how many copies each slot is `claimed` to have, besides the rank's own.
        """
        self.work.learnt(process, claimed)
        window, rollbacks = process.store.persisted, process.store.rollbacks
        assert window is not None
        known = self._persisted.get(rollbacks)
        if known is not None and window <= known:
            return
        for key in self._world.shape.slots_of(window):
            owner = self._world.occupant(key.owner)
            if owner is None:
                continue
            copies = [
                self._world.processes[number].domain
                for number in self._ever_held.get(key, ())
                if self._has(number, key)
            ]
            require(
                len(set(copies)) > self._wanted_copies(owner, claimed),
                "2 persisted",
                f"{process} takes {window} for persisted with {key} at {sorted(copies)}",
            )
        self._persisted[rollbacks] = window
        self._world.outcome.lags.append(process.state.step - window.last)

    def _wanted_copies(self, owner: Process, claimed: int) -> int:
        """Returns how many copies a slot must have: what is claimed, and one if there can be."""
        elsewhere = any(other.domain != owner.domain for other in self._world.live)
        return max(claimed, int(self._world.scenario.replicas > 0 and elsewhere))

    def _has(self, number: int, key: SlotKey) -> bool:
        """Returns whether a process has a slot, unless a fault has taken it."""
        process = self._world.processes[number]
        damaged = (number, key) in self.damaged_slots
        return not process.alive or damaged or key in process.store.slots

    def drops(self, process: Process, keys: Iterable[SlotKey], new: SlotKey) -> None:
        """Checks that only garbage is dropped: a launch may bring back slots of old schedules.

        All slots after one of a window before the persisted one are captured again, and so are
        those of later steps while no window is persisted: all ranks replay from the first state.
        """
        persisted = self._persisted.get(process.store.rollbacks)
        if persisted is not None and new.window < persisted:
            return
        schedule_version = self._epochs.get(process.store.rollbacks, 0)
        for key in keys:
            is_later = key.step < new.step if persisted is None else key.step >= persisted.start
            needed = is_later and key.window.schedule_version >= schedule_version
            require(not needed, "2 dropped", process, "drops", key, "while", persisted, "needs it")

    def agreed(
        self, process: Process, facts: Facts, plan: Plan, digests: Mapping[int, str]
    ) -> None:
        """Checks the plan of a generation."""
        same = all(digest == plan.digest for digest in digests.values())
        require(same, "5 one plan", process, "has another plan than the others")
        if plan.generation in self._judged:
            return
        self._judged.add(plan.generation)
        self._forget_entries(facts)
        rollbacks = max(each.rollbacks for each in facts.processes)
        there = [each for each in facts.processes if each.committed is not None]
        there = [each for each in there if not each.is_new] or there
        rollbacks = max((each.rollbacks for each in there), default=rollbacks)
        there = [each for each in there if each.rollbacks == rollbacks]
        known = [each.committed or 0 for each in there]
        if plan.verdict is not Verdict.ROLLBACK:
            require(plan.target == max(known), "4 target", plan.target, "instead of", max(known))
            for each in facts.processes:
                beyond = each.live.condition is Condition.DENSE and each.live.step > plan.target
                what = f"p{each.process} is at {each.live.step}, the target is {plan.target}"
                require(not beyond, "4 target", what)
            has_sources(plan, facts)
            if plan.persisted is not None:  # a launch may bring back windows that were given up
                self._persisted.setdefault(plan.rollbacks, plan.persisted)
            self._keeps_progress(plan, facts)
            if plan.edges is WindowEdges.RESTARTED or plan.is_from_durable:
                self._nothing_left(facts, plan)
        elif plan.target < max(known, default=plan.target + 1):
            self._nothing_left(facts, plan)
            redone = range(plan.target + 1, max(known, default=0) + 1)
            if redone:
                led = any(set(redone).issubset(each.ledger) for each in there)
                require(not led, "7 progress", "steps", redone, "are lost, and a ledger has them")
            stand = all(
                process.rollbacks == rollbacks
                and process.live.condition is Condition.DENSE
                and max(known) in {process.live.step, process.live.finished}
                for process in facts.by_rank.values()
            )
            require(not stand, "7 progress", plan.verdict.value, "although every rank holds", known)

    def _keeps_progress(self, plan: Plan, facts: Facts) -> None:
        """7: a stage that lost nothing goes on from where it is, if its log covers all until there.

        One that rolls forward is at the target: its log has to have the target's step, too. All go
        back together where a ring must have dropped slots of the window by the step after.
        """
        window, timetable = plan.window, plan.schedules.timetable
        if window is None or timetable is None or window != plan.persisted:
            return
        if plan.target > timetable.last_before_persisted(window) + 1:
            return

        def comes_to_target(live: LiveState) -> bool:
            return plan.target in {live.step, live.finished}

        for replay in (each for each in plan.replays if each.origin is Origin.WINDOW):
            members = facts.stage(replay.stage)
            lives = [process.live for process in members]
            lost = {Condition.TORN, Condition.ABSENT}
            if any(one.condition in lost or one.window not in {None, plan.window} for one in lives):
                continue
            kept = max(live.step for live in lives)
            if any(kept not in {live.step, live.finished} for live in lives):
                continue
            if kept <= replay.start or self._coupled_lost(replay.stage):
                continue
            reached = plan.target if all(map(comes_to_target, lives)) else kept
            if self._slot_in_flight_lost(replay.stage, facts, reached):
                continue
            reaches = all(self._log_reaches(process, plan, reached) for process in members)
            require(not reaches, "7 progress", "stage", replay.stage, "gives up step", kept)

    def _slot_in_flight_lost(self, stage: int, facts: Facts, kept: int) -> bool:
        """Returns whether faults took every copy of a slot that only a replay captures again."""
        persisted = max(each.persisted for each in facts.processes if each.persisted is not None)
        return any(
            key.owner.pp == stage
            and persisted.last < key.step < kept
            and not any(self._still_has(number, key) for number in numbers)
            for key, numbers in self._ever_held.items()
        )

    def _coupled_lost(self, stage: int) -> bool:
        ranks = self._world.shape.groups[stage]
        lives = [None if one is None else one.live for one in map(self._world.occupant, ranks)]
        is_lost = any(live is None or live.torn for live in lives)
        return is_lost or len(ranks) > len(self._world.shape.layout.stage_ranks(stage))

    def _log_reaches(self, process: ProcessFacts, plan: Plan, kept: int) -> bool:
        assert process.rank is not None
        receivers = self._world.shape.receivers[process.rank.pp]
        return all(
            log.steps.issuperset(range(plan.start(receivers[log.direction]) + 1, kept + 1))
            for log in process.logs
        )

    def _nothing_left(self, facts: Facts, plan: Plan) -> None:
        """2 and 7: falling back to storage, or giving up, is right only when nothing else is."""
        rollbacks = max(each.rollbacks for each in facts.processes)
        newest = [each for each in facts.processes if each.rollbacks == rollbacks]
        window = max((each.persisted for each in newest if each.persisted), default=None)
        begun = max((each.timetable.first_version for each in newest if each.timetable), default=0)
        if window is None:
            return
        if window.schedule_version < begun and plan.verdict is not Verdict.ROLLBACK:
            return  # a launch brought back what windows were begun anew without; no step is lost
        is_whole = all(
            any(self._still_has(number, key) for number in self._ever_held[key])
            for key in self._world.shape.slots_of(window)
        )
        verdict = plan.verdict.value
        require(not is_whole, "7 recoverable", verdict, "although", window, "is recoverable")

    def _still_has(self, number: int, key: SlotKey) -> bool:
        process = self._world.processes[number]
        damaged = (number, key) in self.damaged_slots
        newest = max(other.store.rollbacks for other in self._world.live)
        return process.alive and not damaged and process.store.rollbacks == newest

    def restarts_windows(self, plan: Plan) -> None:
        """Forgets the windows of an era when its first process does."""
        version = self._version_of(plan)
        if self._epochs.get(plan.rollbacks) != version:
            self._persisted.pop(plan.rollbacks, None)
            self._epochs[plan.rollbacks] = version
            self._newest_window.pop(plan.rollbacks, None)
            self.work.restarts_windows(plan.rollbacks)

    def _version_of(self, plan: Plan) -> int:
        timetable = plan.schedules.timetable
        return 0 if timetable is None else timetable.first_version

    def replayed(self, process: Process, plan: Plan) -> None:
        """Checks the state at the end of a replay."""
        self.is_dense(process, plan.target)
        bound, steps = self._world.scenario.ledger_capacity, plan.replayed_steps
        require(steps <= bound, "3 replay", steps, "steps, at most", bound)

    def is_dense(self, process: Process, step: int) -> None:
        """Checks that a rank holds S_step whole, and the loss of every step up to it."""
        live = process.state
        require(live.step == step, "6 same bits", process, "is at", live.step, "instead of", step)
        require(not live.frozen, "6 same bits", process, "has frozen operators after a replay")
        self._equals_reference(process)
        expected = [self._world.reference.entry(k).loss for k in range(1, step + 1)]
        found = [process.store.losses.get(k) for k in range(1, step + 1)]
        require(found == expected, "6 same bits", process, "has another loss history")

    def generation_begins(self, generation: int, members: Iterable[Process]) -> None:
        """9: nothing of the generation before is left."""
        for process in members:
            is_clean = process.generation == generation and not process.mailbox
            require(is_clean, "9 leftovers", process, "comes from", process.generation)
        left = [name for name in self._world.network.unfinished if name[0] < generation]
        require(not left, "9 leftovers", "collectives", left, "of an older generation")
