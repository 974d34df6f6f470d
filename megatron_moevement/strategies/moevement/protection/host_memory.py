# SPDX-License-Identifier: Apache-2.0
"""Memory: what one process of a protected job keeps in host memory, for itself and for others."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_moevement.backends.backend import Pin
from megatron_moevement.policy.facts.facts import ProcessFacts
from megatron_moevement.runtime.coordination.agreement import AgreementError, gather_read_together
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.notice_board import Topic
from megatron_moevement.runtime.faults.fault_points import FaultPoints
from megatron_moevement.runtime.peers.ledger_messages import OwnHistory
from megatron_moevement.runtime.peers.log_reader import LogReader
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.state_messages import OfferedState
from megatron_moevement.runtime.peers.state_reader import StateReader
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.background_check import BackgroundCheck
from megatron_moevement.runtime.slots.journal import Journal, JournalState
from megatron_moevement.runtime.slots.ring_file import RingFile, SlotRecord
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.runtime.transport.transport import Address
from megatron_moevement.runtime.transport.wire import Kind
from megatron_moevement.runtime.upstream_log.log import UpstreamLog
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.moevement.protection.first_captures import OwnCaptures
from megatron_moevement.strategies.moevement.protection.holdings import Holdings
from megatron_moevement.strategies.moevement.protection.job_plan import JobPlan
from megatron_moevement.strategies.moevement.protection.resident_store import ResidentStore
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.strategies.moevement.protection.spares import NoticesOfSpares

DEADLINE = timedelta(seconds=30)
"""For what travels to a peer to move on, and to be acknowledged."""
_SERVED = {
    Kind.FOUND: FaultPoint.SERVE_SLOT,
    Kind.LOGGED: FaultPoint.SERVE_LOG,
    Kind.STATE_PART: FaultPoint.SERVE_STATE,
}
"""The place of a fault in an answer."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """By what a process serves its peers in one generation, and reaches them.

    Attributes:
        token: the key by which processes of the job recognise each other.
        interface: where copies are received.
        log: what this process serves of what it sent over its stage's boundaries.
    """

    token: bytes = dataclasses.field(repr=False)
    process: int
    interface: str
    generation: Generation
    faults: FaultPoints
    log: UpstreamLog | None = None

    @property
    def me(self) -> Session:
        """Who this process is to its peers."""
        return Session(self.token, self.process, self.generation.number)

    def serve(self, slots: StoredSlots) -> ReplicaServer:
        """Returns a server that keeps copies in rings and gives slots back."""
        return self.generation.own(
            lambda: ReplicaServer(
                self.interface,
                self.me,
                slots,
                deadline=DEADLINE,
                log=self.log,
                halfway=lambda kind: self.faults.strike_outside(_SERVED[kind]),
            )
        )

    def sender(
        self, addresses: Mapping[int, Address], spares: Mapping[int, Address], history: OwnHistory
    ) -> SlotSender:
        """Returns what sends slots.

        Args:
            addresses: of all processes that keep copies.
            spares: of those without a rank.
            history: what these get with the slots.
        """
        return self.generation.own(
            lambda: SlotSender(
                self.me,
                addresses,
                deadline=DEADLINE,
                halfway=lambda record: self.faults.strike(record.step, FaultPoint.SEND),
                history=history,
                spares=spares,
            )
        )


@dataclasses.dataclass(frozen=True)
class _Connected:
    """What is there once all processes have opened their files.

    Attributes:
        slots: what the server gives.
        addresses: for each process its server's.
        history: what spares get with them.
    """

    slots: StoredSlots
    server: ReplicaServer
    addresses: Mapping[int, Address]
    copies: SlotReplicator
    history: OwnHistory


class HostMemory:
    """The store of a process and the connections to its peers; the training thread calls it.

    `open` or `restart_windows` must come first; all ranks call it in step.
    """

    def __init__(
        self,
        holdings: Holdings,
        endpoint: Endpoint,
        carried: ResidentStore,
        device: torch.device,
        pin: Pin,
    ) -> None:
        """Takes part in one generation; the store outlives it.

        Args:
            carried: keeps the store.
            pin: makes host memory a target of asynchronous copies.
        """
        self._holdings = holdings
        self.host, self.store = holdings.host, holdings.store
        self._endpoint = endpoint
        self.generation, self.log = endpoint.generation, endpoint.log
        self._carried = carried
        self._device = device
        self._pin = pin
        board, spares = self.generation.board, self.plan.spares
        self._notices = (
            NoticesOfSpares(board, spares)
            if board is not None and spares and not dist.get_rank()
            else None
        )
        self._connected: _Connected | None = None
        self._check: BackgroundCheck | None = None

    @property
    def plan(self) -> JobPlan:
        """What all agreed on, and for whom else this process keeps copies since then."""
        return self._holdings.plan

    @property
    def host_bytes(self) -> int:
        """Host memory in use."""
        return self._holdings.host_bytes

    @property
    def own_ring(self) -> RingFile:
        """The ring of this rank's slots."""
        return self._holdings.own_ring

    @property
    def journal(self) -> Journal:
        """The journal of this process."""
        return self._holdings.journal

    @property
    def copies(self) -> SlotReplicator:
        """The copies of this rank's slots."""
        return self._peers.copies

    @property
    def _peers(self) -> _Connected:
        assert self._connected is not None
        return self._connected

    def open(
        self,
        tell: Callable[[], Any] = lambda: None,
        read: Callable[[Any], Any] = lambda told: told,
    ) -> list[Any]:
        """Opens the files that are there, makes those that are missing, connects to the peers.

        Args:
            tell: returns what this process tells all others, as soon as its files are open.
            read: returns what is kept of what one tells.

        Returns:
            What is kept of all processes, in the order of ranks.

        Raises:
            UserError: on all ranks: files are of other sizes, the file system is full, or the
                interface is none of the machine's.
            NotOpenedError: the same in a restart.
        """
        served: list[tuple[StoredSlots, ReplicaServer]] = []

        def serve() -> list[Any]:
            slots = self._holdings.open()
            ring, waits = self.own_ring, self.generation.number == 0
            with self.generation.uninterrupted():  # or nobody would unpin what is pinned
                (ring.pin if waits else ring.pin_soon)(self._pin_bytes)
            server = self._endpoint.serve(slots)
            served.append((slots, server))
            return [self.host.process, server.address, tell()]

        def keep(_: int, told: Sequence[Any]) -> tuple[int, Address, Any]:
            process, (host, port), one = told
            return process, (host, port), read(one)

        try:
            told = gather_read_together(serve, self._device, keep)
        except AgreementError as error:
            raise self._carried.not_opened(error, self.generation) from error
        self._endpoint.faults.strike_outside(FaultPoint.OPEN)
        addresses = {process: address for process, address, _ in told}
        plan, occupied = self.plan, self.host.occupied
        addresses |= plan.addresses_of_spares
        history = OwnHistory(occupied, self.store.identity, plan.rings[occupied], plan.journal)
        if self._notices is not None:
            kept = {each.process: plan.kept_counts.get(each.process, 0) for each in plan.spares}
            self._notices.post_reserve(self.store.identity, plan.largest, kept)
        copies = SlotReplicator(
            self._endpoint.sender(addresses, plan.addresses_of_spares, history),
            self.own_ring,
            plan.placement,
            plan.hosts,
            self._endpoint.faults,
            self.generation.uninterrupted,
            self.generation.ping,
        )
        self._connected = _Connected(*served[0], addresses, copies, history)
        return [kept for *_, kept in told]

    def _pin_bytes(self, memory: memoryview) -> Callable[[], None]:
        return self._pin(torch.frombuffer(memory, dtype=torch.uint8))

    @property
    def rejoin_barrier(self) -> str:
        """Names the meeting of all processes at the end of this generation's recovery."""
        return hashlib.sha256(self._endpoint.token).hexdigest()

    def read_state(self, source: int, size_bytes: int) -> StateReader:
        """Returns a reader of the live state of a peer that offers it; the caller closes it.

        Args:
            size_bytes: of the state.
        """
        me, address = self._endpoint.me, self._peers.addresses[source]
        return self.generation.own(
            lambda: StateReader(me, source, address, deadline=DEADLINE, size_bytes=size_bytes)
        )

    def log_reader(self, step_bytes: int) -> LogReader:
        """Returns a reader of the logs of peers; the caller closes it.

        Args:
            step_bytes: of the tensors of a step.
        """
        me, addresses = self._endpoint.me, self._peers.addresses
        return self.generation.own(
            lambda: LogReader(me, addresses, deadline=DEADLINE, step_bytes=step_bytes)
        )

    def check_slots(self, found: Callable[[RingFile, SlotRecord, Sequence[str]], None]) -> None:
        """Has all slots that peers are served from compared with their checksums, from now on.

        Args:
            found: is told of each damaged slot and its damaged parts, by another thread.
        """
        if self._check is None:
            self._check = self.generation.own(
                lambda: BackgroundCheck(lambda: self._peers.slots.rings, found)
            )

    def offer(self, state: OfferedState | None) -> None:
        """Lets peers read the live state of this process, until nothing is offered."""
        self._peers.server.offer(state)

    def restart_windows(
        self, state: JournalState, losses: Mapping[int, float], schedules: Mapping[str, bytes]
    ) -> None:
        """Forgets everything that is there, and opens.

        Whatever cuts it, the journal says what the live state of this process is.

        Args:
            state: what this process knows from now on.
            losses: of all steps before.
            schedules: that the state names.
        """
        self.store.begin_journal(self.plan.journal, state, losses, schedules)
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
            self._peers.history.begin(state, entries, self.journal.losses, self.journal.schedules())

    def change_schedules(self, schedules: Mapping[str, bytes], step: int) -> None:
        """Keeps the schedules that the journal's state of a step is going to name."""
        self.journal.keep_schedules(schedules)
        if self.plan.spares:
            self._peers.history.change(schedules, step)

    def facts_of_spares(self) -> tuple[ProcessFacts, ...]:
        """Returns the facts of those that have no rank; one rank speaks for them."""
        return () if self._notices is None else self._notices.facts()

    def look_for_left(self) -> tuple[int, ...]:
        """Has those that have no rank take in what nobody has adopted; one rank speaks for them."""
        return () if self._notices is None else self._notices.look_for_left(self.store.identity)

    def captures_of_spares(self, rollbacks: int, first_version: int) -> tuple[OwnCaptures, ...]:
        """Returns what those have of slots that have no rank; one rank speaks for them."""
        return () if self._notices is None else self._notices.captures(rollbacks, first_version)

    def schedules_of_spare(self, process: int) -> Mapping[str, bytes]:
        """Returns the schedules that a process without a rank knows; one rank speaks for it."""
        return {} if self._notices is None else self._notices.schedules(process)

    def ledger_of_spare(self, process: int, steps: range) -> dict[str, Any] | None:
        """Returns what a process without a rank knows of steps; one rank speaks for it."""
        return None if self._notices is None else self._notices.ledger(process, steps)

    def forget_left(self) -> None:
        """Removes what nobody is to keep any more; a window has all its copies without it.

        That is what the dead and former launches left, and what this process and spares kept by
        former plans.
        """
        self._holdings.forget_left_behind()
        self.store.drop_reserve()
        self._carried.forget_flushed()
        self._holdings.forget_others(self._peers.slots)
        if self._notices is not None:
            self._notices.post_wanted(self.plan.placement.holders)

    def finish(self) -> None:
        """Says that nobody will go on from the files."""
        self._carried.finish()
        if self.generation.board is not None and self.plan.spares:
            self.generation.board.post(Topic.OVER, self.host.process)

    def close(self) -> None:
        """Ends the connections; the files stay."""
        if self._check is not None:
            self._check.close()
        if self._connected is not None:
            self._connected.copies.close()
            self._connected.server.close()
