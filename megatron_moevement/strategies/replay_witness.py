"""The witness of a replay: compares what it computes with what the job kept of the first time.

A slot's record has a checksum for each of its parts, made when it was captured. Holders keep the
records of slots that a replay captures again. Every slot also carries a digest of the rank's whole
state, so that a dense state can be compared although its slot holds a part of it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_moevement.integrations.megatron.boundary_replay import Verification
from megatron_moevement.policy.guarantee import Level
from megatron_moevement.policy.plan import Plan
from megatron_moevement.policy.ranks import LogicalRank
from megatron_moevement.policy.replay_proof import Compared, ReplayProof
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.slots.slot_record import SlotRecord, record_document
from megatron_moevement.runtime.slots.store import StoreDirectory

FirstCaptures = Mapping[int, frozenset[str]]
"""For each step the digests of the records that anybody has of one rank's slot."""

OwnCaptures = Mapping[str, Mapping[Any, str]]
"""For each rank and step the digest of the record that one process has; as JSON."""


def record_digest(record: SlotRecord) -> str:
    """Returns what stands for a slot: its place, and the checksums of all its parts."""
    return f"{checksum_of(json.dumps(record_document(record)).encode()):016x}"


def captures_of(
    store: StoreDirectory, era: int, epoch: int, steps: Callable[[LogicalRank], range]
) -> OwnCaptures:
    """Returns what a process has of slots.

    Args:
        store: of the process.
        era: of the history that is meant.
        epoch: of its windows.
        steps: returns the steps of a rank's slots that are meant.
    """
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for stored in store.rings():
        ring, meant = store.open_ring(stored.role, stored.owner), steps(stored.owner)
        for record in () if ring is None else ring.records():
            if (record.era, record.window.epoch) == (era, epoch) and record.step in meant:
                found[str(stored.owner)][record.step] = record_digest(record)
    return found


def own_captures(store: StoreDirectory, plan: Plan) -> OwnCaptures:
    """Returns what a process has of the slots that a plan captures again, before it does so.

    Args:
        store: of this process.
        plan: the same on all ranks.
    """
    return captures_of(store, plan.era, plan.epoch, lambda owner: _captured_again(plan, owner))


def first_captures(rank: LogicalRank, plan: Plan, told: Iterable[OwnCaptures]) -> FirstCaptures:
    """Returns what all processes have of the slots of a rank that a plan captures again.

    Args:
        rank: whose slots.
        plan: the same on all ranks.
        told: what `own_captures` returns on all ranks, and what spares have.
    """
    found: dict[int, set[str]] = defaultdict(set)
    for document in told:
        for step, digest in document.get(str(rank), {}).items():
            if int(step) in _captured_again(plan, rank):
                found[int(step)].add(digest)
    return {step: frozenset(digests) for step, digests in found.items()}


def _captured_again(plan: Plan, owner: LogicalRank) -> range:
    return range(plan.start(owner.pp) + 1, plan.target + 1)


class ReplayWitness:
    """Compares one replay of this rank; the capture's thread calls `admits`, the others none."""

    def __init__(self, first: FirstCaptures, target: int, level: Level) -> None:
        """Names what there is to compare with.

        Args:
            first: captures of this rank's slots.
            target: T.
            level: that the job has; it decides whether what differs may be captured.
        """
        self._first = first
        self._target = target
        self._promises = level is Level.EXACT
        self._scalars = Compared()
        self._tensors = Compared()
        self._slots = Compared()
        self._states = Compared()
        self._targets = 0

    @property
    def has_differed(self) -> bool:
        """Whether anything was not the same as the first time."""
        return not self.proof.verified

    @property
    def proof(self) -> ReplayProof:
        """What was compared so far."""
        return ReplayProof(self._scalars, self._tensors, self._slots, self._states, self._targets)

    def note_step(self, sent: Verification | None, *, scalars_equal: bool) -> None:
        """Takes in the comparison of a replayed step.

        Args:
            sent: what was sent to bystanders; None where nobody stands by. What can't be compared
                though a bystander received it counts as different.
            scalars_equal: whether the step's scalars are those of the ledger.
        """
        self._scalars += Compared.one(scalars_equal)
        if sent is not None:
            self._tensors += Compared(sent.equal, len(sent.unequal) + len(sent.unknown))

    def note_state(self, step: int, captured: str | None, replayed: str | None) -> None:
        """Compares the state that is dense now with what its slot says of it.

        Args:
            step: of the state.
            captured: the slot's digest; None where none was computed.
            replayed: the live state's; None likewise.
        """
        if captured is not None and replayed is not None:
            self._states += Compared.one(captured == replayed)
            self._targets += step == self._target

    def admits(self, record: SlotRecord) -> bool:
        """Compares a slot that was captured again; returns whether it may take the first's place.

        Where bits are promised, no slot of a replay that differs replaces what there is.
        """
        known = self._first.get(record.step)
        if known is not None:
            self._slots += Compared.one(known == {record_digest(record)})
            self._targets += record.step == self._target
        return not (self._promises and self.has_differed)
