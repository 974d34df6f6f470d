# SPDX-License-Identifier: Apache-2.0
"""Spares as ranks see them: who keeps copies without a rank, where, and what they hold.

Spares post it, and rank 0 tells the other ranks where they gather anyway. A spare that does not
post in time keeps no copies in this generation.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from megatron_moevement.policy.copies.loopback import Receiver
from megatron_moevement.policy.copies.placement import Host
from megatron_moevement.policy.facts.facts import Facts, ProcessFacts
from megatron_moevement.policy.facts.facts_document import dump_facts, load_facts
from megatron_moevement.policy.job.ranks import Layout, LogicalRank
from megatron_moevement.policy.job.segments import Ends
from megatron_moevement.runtime.coordination.generation import Generation
from megatron_moevement.runtime.coordination.ledger import loss_to_hex
from megatron_moevement.runtime.coordination.notice_board import NoticeBoard, Topic
from megatron_moevement.runtime.slots.journal import Journal
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.stores.store import StoreDirectory
from megatron_moevement.runtime.transport.interface import own_network
from megatron_moevement.runtime.transport.transport import Address
from megatron_moevement.strategies.moevement.protection.first_captures import (
    OwnCaptures,
    captures_of,
)
from megatron_moevement.strategies.moevement.protection.reserve import ReserveSizes

_PATIENCE = timedelta(seconds=5)
"""Spares post before ranks have built their groups, so nobody waits unless one hangs."""
_PATIENCE_WITH_READERS = timedelta(seconds=60)
"""Who says that it holds something reads all of it, as ranks do; its death ends the generation."""
_POLL_S = 0.01
_ALL_STEPS = range(sys.maxsize)


@dataclasses.dataclass(frozen=True)
class Spare:
    """A process that waits for a place and keeps copies meanwhile.

    Attributes:
        address: of its server.
        network: names its loopback interface.
        held: the ranks whose slots it has, each with the step of the newest one.
    """

    process: int
    domain: str
    address: Address
    network: str
    held: Mapping[LogicalRank, int] = dataclasses.field(default_factory=dict)

    @property
    def host(self) -> Host:
        """The process, as placement sees it."""
        return Host(self.process, self.domain)

    def document(self) -> dict[str, Any]:
        """Returns it as JSON."""
        held = [[str(rank), step] for rank, step in sorted(self.held.items())]
        return {**vars(self), "held": held}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Spare:
        """Returns the spare of a document."""
        host, port = document["address"]
        held = {LogicalRank.parse(name): step for name, step in document["held"]}
        return cls(**{**document, "address": (host, port), "held": held})


def find_spares(generation: Generation) -> tuple[Spare, ...]:
    """Returns the spares that keep copies and that this process reaches; rank 0 calls it."""
    count = generation.spares
    if generation.board is None or not count:
        return ()
    posted = _await_notices(
        generation.board, Topic.SPARE, lambda said: len(said) >= count, _PATIENCE
    )
    spares = [Spare.of_document(each) for each in posted.values() if each is not None]
    found = {spare.process: spare for spare in spares}
    network = own_network()
    return tuple(
        found[process]
        for process in sorted(found)
        if found[process].network == network
        or not Receiver(process, network, found[process].address[0]).is_loopback
    )


class NoticesOfSpares:
    """What the spares that keep copies post in a generation; rank 0 reads it for all ranks."""

    def __init__(self, board: NoticeBoard, spares: Sequence[Spare]) -> None:
        """Reads nothing yet."""
        self._board = board
        self._known = {spare.process for spare in spares}
        self._holding = {spare.process for spare in spares if spare.held}

    def facts(self) -> tuple[ProcessFacts, ...]:
        """Returns what they have read of what they hold."""
        found = {}
        posted = self._await(Topic.HELD, self._holding)
        later = dict(self._board.read(Topic.FOUND))
        for text in filter(None, [*posted.values(), *later.values()]):  # what is newer comes last
            for process in load_facts(text, "what a spare posted").processes:
                found[process.process] = process
        return tuple(found[process] for process in sorted(self._known & found.keys()))

    def look_for_left(self, identity: StoreIdentity) -> tuple[int, ...]:
        """Has them look for what was left on their machines.

        Call it when all ranks have taken in what they find: spares take the rest.

        Args:
            identity: of the files that are looked for.

        Returns:
            The spares that hold more now.
        """
        self._board.post(Topic.LEFT, identity.document())
        found = self._await(Topic.FOUND, self._known)
        return tuple(process for process in sorted(self._known & found.keys()) if found[process])

    def ledger(self, process: int, steps: range) -> dict[str, Any] | None:
        """Returns what a spare has of committed steps; None where it has posted nothing.

        Args:
            steps: whose entries are wanted; losses are wanted of all until then.
        """
        if process not in self._known:
            return None
        for posted in reversed(self._board.read(Topic.LEDGER)):
            if posted["process"] == process:
                return {
                    "entries": {
                        step: text for step, text in posted["entries"].items() if int(step) in steps
                    },
                    "losses": {
                        step: loss
                        for step, loss in posted["losses"].items()
                        if int(step) < steps.stop
                    },
                }
        return None

    def schedules(self, process: int) -> Mapping[str, bytes]:
        """Returns the schedules that a spare has posted."""
        posted = (each for each in self._board.read(Topic.LEDGER) if each["process"] == process)
        return {
            digest: bytes.fromhex(text)
            for each in posted
            for digest, text in each["schedules"].items()
        }

    def captures(self, rollbacks: int, first_version: int) -> tuple[OwnCaptures, ...]:
        """Returns what they have of slots, for replays to be compared with.

        Args:
            rollbacks: of the history that is meant.
            first_version: of the schedule with which its windows began.
        """
        posted = self._board.read(Topic.CAPTURES)
        meant = [rollbacks, first_version]
        return tuple(each["captures"] for each in posted if each["history"] == meant)

    def post_reserve(
        self, identity: StoreIdentity, sizes: ReserveSizes, kept: Mapping[int, int]
    ) -> None:
        """Posts how much memory a process needs that gets a rank.

        Args:
            kept: for each of them, of how many ranks it keeps copies anyway.
        """
        by_name = {str(process): count for process, count in kept.items()}
        self._board.post(Topic.RESERVE, [identity.document(), sizes.document(), by_name])

    def post_wanted(self, holders: Mapping[LogicalRank, Sequence[int]]) -> None:
        """Posts whose copies they are to keep.

        Args:
            holders: the processes that keep copies of each rank's slots.
        """
        wanted: dict[str, list[str]] = {str(process): [] for process in sorted(self._known)}
        for rank in sorted(holders):
            for process in {*holders[rank]} & self._known:
                wanted[str(process)].append(str(rank))
        self._board.post(Topic.WANTED, wanted)

    def _await(self, topic: Topic, awaited: Collection[int]) -> dict[int, Any]:
        return _await_notices(
            self._board, topic, lambda said: said.keys() >= set(awaited), _PATIENCE_WITH_READERS
        )


def captures_document(store: StoreDirectory, facts: ProcessFacts) -> dict[str, Any]:
    """Returns what a spare posts of the slots that it has, of the history that it knows."""
    first_version = 0 if facts.timetable is None else facts.timetable.first_version
    captures = captures_of(store, facts.rollbacks, first_version, lambda owner: _ALL_STEPS)
    return {"history": [facts.rollbacks, first_version], "captures": captures}


def ledger_document(process: int, journal: Journal) -> dict[str, Any]:
    """Returns what a spare posts of committed steps."""
    return {
        "process": process,
        "entries": {step: journal.entry(step).decode() for step in journal.entries()},
        "losses": {step: loss_to_hex(loss) for step, loss in journal.losses().items()},
        "schedules": {digest: data.hex() for digest, data in journal.schedules().items()},
    }


def held_document(facts: ProcessFacts, generation: int) -> str:
    """Returns what a spare posts of what it holds."""
    return dump_facts(Facts(generation, Layout(), Ends.INDEPENDENT, 0, (facts,)))


def spare_notice(process: int, document: Any) -> list[Any]:
    """Returns what a spare posts of itself for ranks that wait for it.

    Args:
        document: None where it keeps nothing in this generation.
    """
    return [process, document]


def _await_notices(
    board: NoticeBoard,
    topic: Topic,
    are_all: Callable[[Mapping[int, Any]], bool],
    patience: timedelta,
) -> dict[int, Any]:
    """Returns the newest notice of each spare, once these are all, or the time is over."""
    deadline_s = time.monotonic() + patience.total_seconds()
    while True:
        posted = dict(board.read(topic))
        if are_all(posted) or time.monotonic() >= deadline_s:
            return posted
        time.sleep(_POLL_S)
