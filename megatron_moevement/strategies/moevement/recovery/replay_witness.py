# SPDX-License-Identifier: Apache-2.0
"""The witness of a replay: compares what it computes with what the job kept of the first time.

Slots are compared by the digests of their first captures. Every slot also carries a digest of the
rank's masters, the last one of a window of its whole state, so that a dense state can be compared
although its slot holds a part of it.
"""

from __future__ import annotations

from megatron_moevement.integrations.megatron.boundary_replay import Verification
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.outcome.replay_proof import Compared, ReplayProof
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.strategies.moevement.protection.first_captures import (
    FirstCaptures,
    record_digest,
)


class ReplayWitness:
    """Compares one replay of this rank; the capture's thread calls `admits`, the others none."""

    def __init__(self, first: FirstCaptures, target: int, level: Level) -> None:
        """Names what there is to compare with.

        Args:
            first: captures of this rank's slots.
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
