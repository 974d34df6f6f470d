# SPDX-License-Identifier: Apache-2.0
"""The account of a recovery: what the ranks tell of it, put together in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from megatron_moevement.policy.accounting.parts import RECOVERY
from megatron_moevement.policy.document import Document
from megatron_moevement.policy.job.guarantee import Level
from megatron_moevement.policy.outcome.replay_proof import ReplayProof, proof_of_all
from megatron_moevement.policy.recovery.plan import Verdict

PARTS = tuple(part.value for part in RECOVERY)
"""Of a recovery, in the order of time, from the end of the last step that was trained."""
_BEFORE = PARTS[:4]
"""What all ranks do in step, and a process that comes in new has not measured."""


@dataclasses.dataclass(frozen=True)
class RankAccount(Document):
    """What one rank tells of a recovery.

    Attributes:
        replayed_steps: that it replayed; 0 for a bystander.
        proof: what of its replay was compared with the first time; None for a bystander.
        owed_copies: of its slots, on their way when training resumes.
        moved_copies: of slots that were there already, sent to holders that lacked them or fetched.
    """

    replayed_steps: int
    proof: ReplayProof | None
    breakdown_s: Mapping[str, float]
    owed_copies: int
    moved_copies: int = 0

    @property
    def verified(self) -> bool | None:
        """Whether nothing that was replayed differed from the first time; None for a bystander."""
        return None if self.proof is None else self.proof.verified


@dataclasses.dataclass(frozen=True)
class RecoveryAccount:
    """One recovery of a job.

    Attributes:
        ranks: what each rank tells, in any order.
    """

    generation: int
    verdict: Verdict
    scope: tuple[int, ...]
    target: int
    level: Level
    ranks: Sequence[RankAccount]

    @property
    def replayed_steps(self) -> int:
        """The most steps that a rank replayed."""
        return max((own.replayed_steps for own in self.ranks), default=0)

    @property
    def verified(self) -> bool:
        """Whether no replay did anything else than the first time."""
        return all(own.verified is not False for own in self.ranks)

    @property
    def breakdown_s(self) -> Mapping[str, float]:
        """The parts that decided how long it took, in the order of time.

        From the rank for which all others waited; what lies before the plan, from a survivor.
        """
        if not self.ranks:
            return {}
        slowest = min(self.ranks, key=lambda own: own.breakdown_s.get("wait", 0.0)).breakdown_s
        before = {
            part: max(own.breakdown_s.get(part, 0.0) for own in self.ranks)
            for part in _BEFORE
            if any(part in own.breakdown_s for own in self.ranks)
        }
        known = {**slowest, **before}
        return {part: known[part] for part in PARTS if part in known}

    @property
    def owed_copies(self) -> int:
        """Copies of slots that were on their way when training resumed."""
        return sum(own.owed_copies for own in self.ranks)

    @property
    def duration_s(self) -> float:
        """Seconds from the end of the last step: the whole outage, detection included."""
        return sum(self.breakdown_s.values())

    @property
    def line(self) -> str:
        """All of it, for people."""
        stages = ", ".join(str(stage) for stage in self.scope)
        scope = f"stage{'s' if len(self.scope) > 1 else ''} {stages} replayed" if stages else ""
        proof = proof_of_all(own.proof for own in self.ranks)
        if scope:
            steps = "step" if self.replayed_steps == 1 else "steps"
            scope = f", {scope} {self.replayed_steps} {steps} ({proof.words})"
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.breakdown_s.items())
        promise = self.level.value
        if self.level is Level.EXACT and proof.unproven:
            ranks = "rank" if proof.unproven == 1 else "ranks"
            promise += f" but for the final state of {proof.unproven} {ranks}, which is not proven"
        owed = f", {self.owed_copies} copies on their way" if self.owed_copies else ""
        return (
            f"generation {self.generation}: {self.verdict.value}{scope}, resumed at step "
            f"{self.target}, {self.duration_s:.1f} s ({parts}), guarantee {promise}{owed}"
        )
