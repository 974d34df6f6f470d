# SPDX-License-Identifier: Apache-2.0
"""What goes to a spare beside the slots: the ledger, and what the job has agreed on.

Ranks learn this at the commit barrier, and have it in their journals. A spare hears of no barrier:
without it nobody could go on from its copies where all ranks are lost.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_moevement.policy.copies.journal_state import JournalState
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.runtime.slots.journal import JournalShape
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.transport.wire import ProtocolError

_LOSS_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class History:
    """What one rank knows, or what it has learnt since it was last told.

    Attributes:
        entries: ledger entries by their steps; without the newest ones' predecessors nothing can be
            replayed, so the first time all are there that are retained.
        losses: of steps; the first time of all.
        schedules: that the state names and the peer may not know, by their digests.
    """

    owner: LogicalRank
    identity: StoreIdentity
    ring: RingShape
    journal: JournalShape
    state: JournalState
    entries: Mapping[int, bytes]
    losses: Mapping[int, float]
    schedules: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Returns it as JSON; the losses of two million steps fit into a message."""
        schedules = {digest: data.hex() for digest, data in self.schedules.items()}
        return {
            "owner": str(self.owner),
            "identity": self.identity.document(),
            "ring": self.ring.document(),
            "journal": self.journal.document(),
            "state": self.state.document(),
            "entries": [[step, self.entries[step].decode()] for step in sorted(self.entries)],
            "losses": _runs(self.losses),
            **({"schedules": schedules} if schedules else {}),
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> History:
        """Returns what a peer tells.

        Raises:
            ProtocolError: it is no history.
        """
        try:
            return cls(
                LogicalRank.parse(document["owner"]),
                StoreIdentity.of_document(document["identity"]),
                RingShape.of_document(document["ring"]),
                JournalShape.of_document(document["journal"]),
                JournalState.of_document(document["state"]),
                {_count(step): text.encode() for step, text in document["entries"]},
                dict(_losses(document["losses"])),
                {
                    digest: bytes.fromhex(text)
                    for digest, text in document.get("schedules", {}).items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
            raise ProtocolError(f"no history: {error}") from error


def _runs(losses: Mapping[int, float]) -> list[list[Any]]:
    """Returns losses of steps in a row as one text each, behind the first step."""
    runs: list[list[Any]] = []
    former = -1
    for step in sorted(losses):
        digits = struct.pack(">f", losses[step]).hex()
        if runs and step == former + 1:
            runs[-1][1].append(digits)
        else:
            runs.append([step, [digits]])
        former = step
    return [[first, "".join(digits)] for first, digits in runs]


def _losses(runs: Iterable[Any]) -> Iterable[tuple[int, float]]:
    for first, text in runs:
        for place in range(len(text) // _LOSS_DIGITS):
            digits = text[place * _LOSS_DIGITS : (place + 1) * _LOSS_DIGITS]
            yield _count(first) + place, struct.unpack(">f", bytes.fromhex(digits))[0]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"no count: {value!r}")
    return value


class OwnHistory:
    """What this rank has to tell; the training thread notes, and threads that send copies read."""

    def __init__(
        self,
        owner: LogicalRank,
        identity: StoreIdentity,
        ring: RingShape,
        journal: JournalShape,
    ) -> None:
        self._owner, self._identity = owner, identity
        self._ring, self._journal = ring, journal
        self._lock = threading.Lock()
        self._state: JournalState | None = None
        self._entries: dict[int, bytes] = {}
        self._losses: dict[int, float] = {}
        self._all_losses: Callable[[], Mapping[int, float]] = dict
        self._schedules: Mapping[str, bytes] = {}
        self._changed_in = 0

    def begin(
        self,
        state: JournalState,
        entries: Mapping[int, bytes],
        losses: Callable[[], Mapping[int, float]],
        schedules: Mapping[str, bytes],
    ) -> None:
        """Takes over what the journal has.

        Args:
            losses: returns those of all committed steps; called by a thread that sends copies.
        """
        with self._lock:
            self._state = state
            self._entries, self._losses = dict(entries), {}
            self._all_losses = losses
            self._schedules, self._changed_in = dict(schedules), state.committed

    def change(self, schedules: Mapping[str, bytes], step: int) -> None:
        """Takes note of the schedules that the state of a step is going to name."""
        with self._lock:
            self._schedules, self._changed_in = dict(schedules), step

    def note(self, state: JournalState, step: int, entry: bytes, loss: float) -> None:
        """Takes note of a step that the journal has."""
        with self._lock:
            self._state = state
            self._entries[step], self._losses[step] = entry, loss
            self._entries.pop(step - self._journal.retained_steps, None)
            self._losses.pop(step - self._journal.retained_steps, None)

    def after(self, told: int | None) -> History | None:
        """Returns what is to be told to a peer; None where nothing is known yet.

        Args:
            told: the newest step that it was told of; None: it was told nothing.
        """
        newest = -1 if told is None else told
        with self._lock:
            state = self._state
            if state is None:
                return None
            entries = {step: text for step, text in self._entries.items() if step > newest}
            losses = {step: loss for step, loss in self._losses.items() if step > newest}
            schedules = self._schedules if told is None or self._changed_in > newest else {}
        if told is None:
            losses = {**self._all_losses(), **losses}
        return History(
            *(self._owner, self._identity, self._ring, self._journal),
            dataclasses.replace(state, rank=None),
            entries,
            losses,
            schedules,
        )
