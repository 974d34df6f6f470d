"""Memory: what one process of a protected job keeps in host memory, for itself and for others."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.facts.facts import ProcessFacts
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.coordination.agreement import AgreementError, gather_together
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.notice_board import Topic
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.runtime.peers.history import OwnHistory
from megatron_moevement.runtime.peers.log_reader import LogReader
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.state_messages import OfferedState
from megatron_moevement.runtime.peers.state_reader import StateReader
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.journal import Journal, JournalState
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.stores.store import RingRole, StoreDirectory, StoredRing
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address
from megatron_moevement.runtime.transport.wire import Kind
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.protection.first_captures import OwnCaptures
from megatron_moevement.strategies.moevement.protection.job_plan import JobPlan
from megatron_moevement.strategies.moevement.protection.resident_store import ResidentStore
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.strategies.moevement.protection.spares import (
    captures_of_spares,
    facts_of_spares,
    ledger_of_spare,
    look_for_left,
)

DEADLINE = timedelta(seconds=60)
"""For one slot, or one logged tensor, to reach a peer and be acknowledged."""
_SERVED = {
    Kind.FOUND: FaultPoint.SERVE_SLOT,
    Kind.LOGGED: FaultPoint.SERVE_LOG,
    Kind.STATE_PART: FaultPoint.SERVE_STATE,
}
"""The place of a fault in an answer."""


@dataclasses.dataclass(frozen=True)
class _Opened:
    """Files that are open, and the server that gives slots out of them."""

    own_ring: RingFile
    journal: Journal
    slots: StoredSlots
    server: ReplicaServer


@dataclasses.dataclass(frozen=True)
class _Connected:
    """The peers: for each process its server's address, what goes to them."""

    addresses: Mapping[int, Address]
    copies: SlotReplicator
    history: OwnHistory


class HostMemory:
    """The store of a process and the connections to its peers; the training thread calls it.

    `open` or `restart_windows` must come first; all ranks call it in step.
    """

    def __init__(  # noqa: PLR0917  (what a process takes part with)
        self,
        plan: JobPlan,
        host: Host,
        carried: ResidentStore,
        store: StoreDirectory,
        interface: str,
        device: torch.device,
        *,
        generation: Generation,
        pin: Callable[[torch.Tensor], None],
        faults: FaultPoints,
        token: bytes,
        log: UpstreamLog | None = None,
    ) -> None:
        """Takes part in one generation; the store outlives it.

        Args:
            plan: what all ranks agreed on.
            host: this process.
            carried: keeps the store.
            store: its files, locked.
            interface: where copies are received.
            device: where collectives keep their tensors.
            generation: owns the connections.
            pin: makes host memory a target of asynchronous copies.
            faults: where this process fails on purpose.
            token: the key by which processes of the job recognise each other.
            log: what this process serves of what it sent over its stage's boundaries.
        """
        self.plan = plan
        """What all agreed on, and for whom else this process keeps copies since then."""
        self.host_bytes = plan.accounts()[host.process].total_bytes
        """Host memory in use; all of it is allocated at the start, but for what is taken over."""
        self.host = host
        self.store = store
        self.generation = generation
        self._carried = carried
        self._left_behind = carried.left_behind()  # all live processes have locked their stores
        self._interface = interface
        self._device = device
        self._pin = pin
        self._faults = faults
        self.log = log
        self._session = Session(token, host.process, generation.number)
        self._opened: _Opened | None = None
        self._connected: _Connected | None = None
        self._lock = threading.Lock()  # of the store's files, once the server listens

    @property
    def own_ring(self) -> RingFile:
        """The ring of this rank's slots."""
        return self._files.own_ring

    @property
    def journal(self) -> Journal:
        """The journal of this process."""
        return self._files.journal

    @property
    def copies(self) -> SlotReplicator:
        """The copies of this rank's slots."""
        return self._peers.copies

    @property
    def _files(self) -> _Opened:
        assert self._opened is not None
        return self._opened

    @property
    def _peers(self) -> _Connected:
        assert self._connected is not None
        return self._connected

    def open(self, tell: Callable[[], Any] = lambda: None) -> list[Any]:
        """Opens the files that are there, makes those that are missing, connects to the peers.

        Args:
            tell: returns what this process tells all others, as soon as its files are open.

        Returns:
            What all processes tell, in the order of ranks.

        Raises:
            UserError: on all ranks: files are of other sizes, the file system is full, or the
                interface is none of the machine's.
            NotOpenedError: the same in a restart.
        """
        try:
            told = gather_together(lambda: [self._serve(), tell()], self._device)
        except AgreementError as error:
            raise self._carried.not_opened(error, self.generation) from error
        self._faults.strike_outside(FaultPoint.OPEN)
        addresses = {process: (host, port) for (process, host, port), _ in told}
        addresses |= self.plan.addresses_of_spares
        ring = self.plan.rings[self.host.occupied]
        history = OwnHistory(self.host.occupied, self.store.identity, ring, self.plan.journal)
        sender = self.generation.own(
            lambda: SlotSender(
                self._session,
                addresses,
                deadline=DEADLINE,
                halfway=lambda record: self._faults.strike(record.step, FaultPoint.SEND),
                history=history,
                spares=self.plan.addresses_of_spares,
            )
        )
        copies = SlotReplicator(
            sender,
            self.own_ring,
            self.plan.placement,
            self.plan.hosts,
            self._faults,
            self.generation.uninterrupted,
        )
        self._connected = _Connected(addresses, copies, history)
        return [one for _, one in told]

    def _serve(self) -> tuple[int, str, int]:
        """Opens the files, and a server that keeps copies in them and gives slots back.

        Returns:
            This process, and the address of its server.
        """
        self._check_space(self.plan)
        rings = self.plan.rings
        journal = self.store.journal(self.plan.journal)
        own_ring = self.store.ring(RingRole.OWN, self.host.occupied, rings[self.host.occupied])
        with self.generation.uninterrupted():  # memory can be pinned only once
            self._carried.pin(own_ring, self._pin)
        slots = StoredSlots(own_ring, self._take_over)
        for owner in self.plan.kept_for(self.host.process):
            slots.keep(self.store.ring(RingRole.HELD, owner, rings[owner]))
        for stored in self._rings_of_former_plans():
            ring = self.store.open_ring(stored.role, stored.owner)
            if ring is not None and self._may_take_copies(stored):
                slots.keep(ring)
            elif ring is not None:
                slots.serve(ring)
        server = self.generation.own(
            lambda: ReplicaServer(
                self._interface,
                self._session,
                slots,
                deadline=DEADLINE,
                log=self.log,
                halfway=lambda kind: self._faults.strike_outside(_SERVED[kind]),
            )
        )
        self._opened = _Opened(own_ring, journal, slots, server)
        return (self.host.process, *server.address)

    def _take_over(self, owner: LogicalRank) -> RingFile | None:
        """Returns a ring for a rank of which another process was to keep copies.

        Raises:
            UserError: there is no room for it.
        """
        if owner not in self.plan.rings or owner == self.host.rank:
            return None
        with self._lock:
            plan = self.plan.with_holder(owner, self.host.process)
            plan.check_limit(self.host.process)
            self._check_space(plan)
            ring = self.store.ring(RingRole.HELD, owner, plan.rings[owner])
            self.plan = plan
            self.host_bytes += plan.rings[owner].total_bytes
        return ring

    def _check_space(self, plan: JobPlan) -> None:
        account = plan.accounts()[self.host.process]
        self.store.check_space(account.total_bytes - account.logs_bytes)  # which lie in no file

    @property
    def rejoin_barrier(self) -> str:
        """Names the meeting of all processes at the end of this generation's recovery."""
        return hashlib.sha256(self._session.token).hexdigest()

    def read_state(self, source: int) -> StateReader:
        """Returns a reader of the live state of a peer that offers it; the caller closes it."""
        address = self._peers.addresses[source]
        return StateReader(self._session, source, address, deadline=DEADLINE)

    def log_reader(self, max_bytes: int) -> LogReader:
        """Returns a reader of the logs of peers; the caller closes it.

        Args:
            max_bytes: of tensors that it holds at a time.
        """
        me, addresses = self._session, self._peers.addresses
        return self.generation.own(
            lambda: LogReader(me, addresses, deadline=DEADLINE, max_bytes=max_bytes)
        )

    def offer(self, state: OfferedState | None) -> None:
        """Lets peers read the live state of this process, until nothing is offered."""
        self._files.server.offer(state)

    def restart_windows(self, state: JournalState, losses: Mapping[int, float]) -> None:
        """Forgets everything that is there, and opens.

        Whatever cuts it, the journal says what the live state of this process is.

        Args:
            state: what this process knows from now on.
            losses: of all steps before.
        """
        self.store.begin_journal(self.plan.journal, state, losses)
        self.store.clear_rings()
        self.open()
        self.begin_history()

    def commit(self, state: JournalState, step: int, entry: bytes, loss: float) -> None:
        """Writes a step into the journal, and notes it for spares that keep copies."""
        self.journal.commit(state, step, entry, loss)
        if self.plan.spares:
            self._peers.history.note(state, step, entry, loss)

    def begin_history(self) -> None:
        """Lets spares that keep copies know what the journal says; nothing was sent before."""
        state = self.journal.state
        if self.plan.spares and state is not None:
            entries = {step: self.journal.entry(step) for step in self.journal.entries()}
            self._peers.history.begin(state, entries, self.journal.losses)

    def facts_of_spares(self) -> tuple[ProcessFacts, ...]:
        """Returns the facts of those that have no rank; one rank speaks for them."""
        if dist.get_rank():
            return ()
        return facts_of_spares(self.generation, self.plan.spares)

    def look_for_left(self) -> tuple[int, ...]:
        """Has those that have no rank take in what nobody has adopted; one rank speaks for them."""
        if dist.get_rank():
            return ()
        return look_for_left(self.generation, self.plan.spares, self.store.identity)

    def captures_of_spares(self, rollbacks: int, schedule_version: int) -> tuple[OwnCaptures, ...]:
        """Returns what those have of slots that have no rank; one rank speaks for them."""
        if dist.get_rank() or not self.plan.spares:
            return ()
        return captures_of_spares(self.generation, rollbacks, schedule_version)

    def ledger_of_spare(self, process: int, steps: range) -> dict[str, Any] | None:
        """Returns what a process without a rank knows of steps; one rank speaks for it."""
        if dist.get_rank() or process not in self.plan.addresses_of_spares:
            return None
        return ledger_of_spare(self.generation, process, steps)

    def forget_left(self) -> None:
        """Removes what nobody is to keep any more; a window has all its copies without it.

        That is what the dead and former launches left, and what this process and spares kept by
        former plans.
        """
        self._carried.remove_left_behind(self._left_behind)
        self._carried.forget_flushed()
        self._forget_others()
        self._tell_spares()

    def _forget_others(self) -> None:
        """Removes the slots that this process keeps for nobody any more."""
        with self._lock:
            for stored in self._rings_of_former_plans():
                ring = self.store.open_ring(stored.role, stored.owner)
                if ring is not None:
                    self._files.slots.drop(ring)
                self.store.drop_ring(stored.role, stored.owner)

    def _tell_spares(self) -> None:
        """Posts whose copies spares are to keep; one rank speaks for all."""
        board = self.generation.board
        if board is None or not self.plan.spares or dist.get_rank():
            return
        wanted = {
            str(spare.process): [str(rank) for rank in self.plan.kept_for(spare.process)]
            for spare in self.plan.spares
        }
        board.post(Topic.WANTED, wanted)

    def _rings_of_former_plans(self) -> tuple[StoredRing, ...]:
        """Returns the rings with slots that others may lack, and that are not in the plan.

        Copies stay where they are, but for those of lost processes; where the limit of host memory
        leaves no room for that, all are spread anew. Where a launch exchanges ranks between
        processes, a process finds others' own slots.
        """
        planned = {(RingRole.HELD, owner) for owner in self.plan.kept_for(self.host.process)}
        return tuple(
            stored
            for stored in self.store.rings()
            if (stored.role, stored.owner) not in {*planned, (RingRole.OWN, self.host.rank)}
        )

    def _may_take_copies(self, stored: StoredRing) -> bool:
        """Returns whether an owner may still send copies into a ring of a former plan."""
        is_kept = stored.owner in self.plan.kept_for(self.host.process)
        return stored.role is RingRole.HELD and stored.owner != self.host.rank and not is_kept

    def finish(self) -> None:
        """Says that nobody will go on from the files."""
        self._carried.finish()
        if self.generation.board is not None and self.plan.spares:
            self.generation.board.post(Topic.OVER, self.host.process)

    def close(self) -> None:
        """Ends the connections; the files stay."""
        if self._connected is not None:
            self._connected.copies.close()
        if self._opened is not None:
            self._opened.server.close()
