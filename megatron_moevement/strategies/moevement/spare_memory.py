# SPDX-License-Identifier: Apache-2.0
"""Spare memory: what a process without a rank keeps for the others while it waits for a place.

It is opened when the first copies come, with what their sender tells of the run: until then a spare
has nothing to do with the files that former launches have left under its number. What it holds
outlives its generations, as the memory of a rank does.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_moevement.backends.backend import Pin
from megatron_moevement.errors import UserError
from megatron_moevement.policy.copies.commit import newest_persisted
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.notice_board import NoticeBoard, Topic
from megatron_moevement.runtime.peers.ledger_messages import History
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.journal import Journal, JournalState
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.place import store_root
from megatron_moevement.runtime.stores.store import (
    RingRole,
    StoreDirectory,
    StoredRing,
    folder_bytes,
)
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.interface import own_network
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.launch import Launch
from megatron_moevement.strategies.moevement.protection.host_memory import DEADLINE
from megatron_moevement.strategies.moevement.protection.left_state import read_left_state
from megatron_moevement.strategies.moevement.protection.placement_of_holders import held_ranks
from megatron_moevement.strategies.moevement.protection.reserve import ReserveSizes, Room
from megatron_moevement.strategies.moevement.protection.resident_store import (
    ResidentStore,
    SparePlace,
)
from megatron_moevement.strategies.moevement.protection.spares import (
    Spare,
    captures_document,
    held_document,
    ledger_document,
    spare_notice,
)
from megatron_moevement.strategies.resident_state import IdleSpare

logger = logging.getLogger(__name__)


class SpareHolder(IdleSpare):
    """What a process keeps for the ranks in one generation in which it has no place.

    The job can do without. NVRx takes an exception of a process that waits for a fault of the job,
    and restarts all without a word: so whatever goes wrong is said here, and the process waits on.
    """

    def __init__(self, process: int, memory: SpareMemory, board: NoticeBoard) -> None:
        """Takes over what is kept."""
        self._process = process
        self._memory: SpareMemory | None = memory
        self._board = board

    def begin(self, generation: Generation, interface: str) -> None:
        """Keeps copies from now on; where that fails, posts nothing for what ranks wait for."""
        self._attempt(lambda memory: memory.begin(generation, interface))
        if self._memory is None:
            for awaited in (Topic.SPARE, Topic.HELD):
                self._board.post(awaited, spare_notice(self._process, None))

    def look(self) -> None:
        """Forgets what the ranks don't want it to keep any more."""
        self._attempt(SpareMemory.look)

    def end(self) -> None:
        """Learns that the ranks have ended their work."""
        self._attempt(SpareMemory.end)

    def _attempt(self, do: Callable[[SpareMemory], None]) -> None:
        if self._memory is None:
            return
        try:
            do(self._memory)
        except (UserError, OSError) as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  (said, with its traceback)
            self._give_up(error, error)

    def _give_up(self, error: Exception, traced: Exception | None = None) -> None:
        self._memory = None
        self._board.post(Topic.FOUND, spare_notice(self._process, None))  # ranks may wait for it
        text = "process %d waits on, and cares for copies no more in this generation: %s: %s"
        logger.warning(text, self._process, type(error).__name__, error, exc_info=traced)


def keep_for_others(
    settings: FaultTolerance,
    launch: Launch,
    domain: str,
    carried: ResidentStore,
    generation: Generation,
    *,
    pin: Pin,
) -> IdleSpare:
    """Keeps copies for the ranks from now on, where any are made.

    Args:
        domain: what it may be lost together with.
        carried: has its store, where it has one.
        generation: in which it waits; owns the connections.
        pin: makes host memory a target of asynchronous copies.
    """
    if not settings.makes_copies or launch.secret is None or generation.board is None:
        return IdleSpare()
    carried.pin = pin
    key = launch.secret.derive("replication", launch.attempt)
    memory = SpareMemory(
        carried,
        store_root(settings),
        Session(key, launch.process, generation.number),
        Host(launch.process, domain),
        generation.board,
        processes=launch.processes,
        limit_bytes=settings.host_memory_limit_bytes,
    )
    holder = SpareHolder(launch.process, memory, generation.board)
    holder.begin(generation, settings.moevement_replication_interface)
    return holder


class SpareMemory:
    """The copies that a process keeps in one generation in which it has no rank.

    Threads of its server write, one at a time; the training thread does the rest.
    """

    def __init__(
        self,
        carried: ResidentStore,
        root: Path,
        me: Session,
        host: Host,
        board: NoticeBoard,
        *,
        processes: int,
        limit_bytes: int | None,
    ) -> None:
        """Keeps nothing yet.

        Args:
            carried: has what it kept in former generations.
            root: the store directory.
            me: who this process is to its peers.
            board: for ranks to read.
            processes: of the job.
            limit_bytes: host memory that it may take; None without a limit.
        """
        self._carried = carried
        self._place = SparePlace(root, me.process, processes)
        self._me = me
        self._host = host
        self._board = board
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self._lock = threading.Lock()  # of the store
        self._slots = StoredSlots(None, learn=self.learn)
        self._told: set[LogicalRank] = set()
        self._has_looked = False
        self._persisted: Window | None = None
        self._reserve: list[Any] = []  # what ranks have posted of it

    def begin(self, generation: Generation, interface: str) -> None:
        """Listens on an interface, and posts where, and what it holds."""
        store = self._carried.store
        if store is not None:
            self._serve(store)
        server = generation.own(
            lambda: ReplicaServer(interface, self._me, self._slots, deadline=DEADLINE)
        )
        held = {} if store is None else held_ranks(store, *RingRole)
        spare = Spare(self._me.process, self._host.domain, server.address, own_network(), held)
        self._board.post(Topic.SPARE, spare_notice(self._me.process, spare.document()))
        if store is not None and held:
            with self._lock:
                facts = self._offer(store)
            self._board.post(Topic.HELD, spare_notice(self._me.process, facts))

    def _serve(self, store: StoreDirectory) -> None:
        for stored in store.rings():
            ring = store.open_ring(stored.role, stored.owner)
            if ring is not None:
                self._slots.serve(ring)

    def _offer(self, store: StoreDirectory) -> str:
        """Posts what goes with the facts of what it holds, and returns these."""
        facts = read_left_state(store, self._host, self._me.generation)
        journal = store.open_journal()
        if journal is not None:  # before what refers to it
            self._board.post(Topic.LEDGER, ledger_document(self._host.process, journal))
        self._board.post(Topic.CAPTURES, captures_document(store, facts))
        # It knows by hearsay what is committed: that counts where no rank is left.
        return held_document(dataclasses.replace(facts, is_new=True), self._me.generation)

    def learn(self, history: History) -> None:
        """Takes along what a rank knows, and makes room for its slots.

        Raises:
            UserError: the run is another one, its history an older one, or there is no room.
        """
        with self._lock:
            store = self._carried.hold(self._place, history.identity)
            known = self._begin_history(store, history)
            self._check_room(store, history)
            journal = store.journal(history.journal)
            ring = store.ring(RingRole.HELD, history.owner, history.ring)
            _take_along(journal, known, history, is_first=not self._told)
            self._told.add(history.owner)
            self._slots.keep(ring)

    def look(self) -> None:
        """Offers what was left here where ranks lack it, and forgets what they don't want."""
        self._look_for_left()
        self._look_for_reserve()
        store = self._carried.store
        with self._lock:
            if store is None:
                return
            self._forget_left(store)
            # What was left by a rank's process is no copy that its successor goes on to send.
            held = [
                stored
                for stored in store.rings()
                if stored.role is RingRole.OWN or stored.owner not in self._told
            ]
        wanted = self._board.read(Topic.WANTED) if held else []
        own = wanted[-1].get(str(self._me.process)) if wanted else None
        if own is None:  # this process posted too late to be counted: others may lack what it has
            return
        with self._lock:
            for stored in held:
                is_told = stored.owner in self._told
                if stored.role is RingRole.HELD and (is_told or str(stored.owner) in own):
                    continue
                self._drop(store, stored)

    def _look_for_reserve(self) -> None:
        """Makes the memory of a rank, once ranks have posted how much that is, where there is room.

        What lacks room then may have it once a window is persisted: ranks remove what was left, and
        make no files any more.
        """
        if self._reserve and not self._board.read(Topic.WANTED):
            return
        self._reserve = self._reserve or self._board.read(Topic.RESERVE)[-1:]
        for identity, sizes, by_name in self._reserve:
            run, largest = StoreIdentity.of_document(identity), ReserveSizes.of_document(sizes)
            kept = by_name.get(str(self._me.process), 0)
            with self._lock:
                store = self._carried.hold(self._place, run)
                taken_bytes = folder_bytes(store.folder)
                awaited_bytes = max(kept * largest.ring_bytes - taken_bytes, 0)
                room = Room(self._limit_bytes - taken_bytes, awaited_bytes)
                self._carried.make_reserve(largest.beside(kept), room)

    def _look_for_left(self) -> None:
        """Takes in what was left on this machine once ranks lack it, and offers it."""
        asked = [] if self._has_looked or self._told else self._board.read(Topic.LEFT)
        if not asked:
            return
        self._has_looked, process, facts = True, self._me.process, None
        identity = StoreIdentity.of_document(asked[-1])
        with self._lock:
            store = self._carried.store
            for stored in () if store is None else store.rings():
                ring = None if store is None else store.open_ring(stored.role, stored.owner)
                if ring is not None:  # it may be replaced
                    self._slots.drop(ring)
            taken = self._carried.take_in_copies(self._place, identity)
            if (store := self._carried.store) is not None:
                self._serve(store)
                facts = self._offer(store) if taken else None
        self._board.post(Topic.FOUND, spare_notice(process, facts))

    def _forget_left(self, store: StoreDirectory) -> None:
        """Removes what was left here once ranks have persisted a window after it."""
        journal = store.open_journal()
        state = None if journal is None else journal.state
        if not self._told or state is None or state.persisted == self._persisted:
            return
        self._persisted = state.persisted
        self._carried.remove_outdated()

    def _drop(self, store: StoreDirectory, stored: StoredRing) -> None:
        ring = store.open_ring(stored.role, stored.owner)
        if ring is not None:
            self._slots.drop(ring)
        store.drop_ring(stored.role, stored.owner)

    def end(self) -> None:
        """Lets the files be removed where ranks have said that nobody will go on from them."""
        if self._board.read(Topic.OVER):
            self._carried.end()

    def _begin_history(self, store: StoreDirectory, history: History) -> JournalState:
        """Forgets all of another history: none of it must be taken for this one's.

        Whatever a spare has heard before, a generation goes on with what its ranks agreed on.

        Returns:
            What the journal says of this history.
        """
        journal, told = store.open_journal(), history.state
        known = None if journal is None else journal.state
        if (
            known is not None
            and known.rollbacks == told.rollbacks
            and known.timetable.first_version == told.timetable.first_version
        ):
            return known
        if self._told:
            raise UserError(
                f"process {self._me.process} keeps slots of another history than {history.owner} is"
            )
        for stored in store.rings():
            self._drop(store, stored)
        first = min(history.entries, default=told.committed + 1)
        state = dataclasses.replace(told, committed=max(first - 1, 0), persisted=None)
        store.begin_journal(history.journal, state, {}, history.schedules)
        return state

    def _check_room(self, store: StoreDirectory, history: History) -> None:
        if store.open_ring(RingRole.HELD, history.owner) is not None:
            return
        ring_bytes = history.ring.total_bytes
        taken_bytes = folder_bytes(store.folder) + ring_bytes
        if taken_bytes > self._limit_bytes:
            raise UserError(
                f"process {self._me.process} may take {self._limit_bytes} bytes of host memory, "
                f"and slots of {history.owner} would make it {taken_bytes}"
            )
        self._carried.make_room(ring_bytes, self._limit_bytes - taken_bytes)
        store.check_space(taken_bytes)


def _take_along(journal: Journal, known: JournalState, history: History, *, is_first: bool) -> None:
    """Writes into a spare's journal what a rank knows.

    Args:
        journal: of the same history.
        known: what it says.
        history: what the rank knows.
        is_first: whether nothing was told in this generation before: then the job may have gone
            back a step, which a rank had committed alone that was lost.
    """
    told = history.state
    journal.keep_schedules(history.schedules)
    if is_first and told.committed < known.committed:
        known = dataclasses.replace(known, committed=told.committed)
        journal.write_state(known)
    entries = {step: text for step, text in history.entries.items() if step > known.committed}
    journal.restore_losses(
        {step: loss for step, loss in history.losses.items() if step not in entries}
    )
    for step in sorted(entries):
        known = dataclasses.replace(known, committed=step)
        journal.commit(known, step, entries[step], history.losses.get(step))
    persisted = newest_persisted(known.persisted, told.persisted)
    committed = max(known.committed, told.committed)
    timetable = told.timetable
    newest_known = known.timetable.newest.schedule_version
    if not is_first and timetable.newest.schedule_version < newest_known:
        timetable = known.timetable  # of a rank that is a step further
    newest = dataclasses.replace(
        known, committed=committed, persisted=persisted, timetable=timetable
    )
    if newest != journal.state:
        journal.write_state(newest)
