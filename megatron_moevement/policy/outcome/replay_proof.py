# SPDX-License-Identifier: Apache-2.0
"""The proof of a replay: what of it was compared with the first time, and what differed.

Four kinds of things are there to compare with: the ledger's scalars of each step, hashes of the
tensors that bystanders received, a digest of the state that every slot carries, and the slots that
a replay captures again, of which holders keep the first capture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megatron_moevement.policy.document import Document


@dataclasses.dataclass(frozen=True)
class Compared:
    """How many of one kind were compared bit for bit, by how that ended."""

    equal: int = 0
    unequal: int = 0

    def __add__(self, other: Compared) -> Compared:
        return Compared(self.equal + other.equal, self.unequal + other.unequal)

    @classmethod
    def one(cls, is_equal: bool) -> Compared:
        """Returns what a single comparison adds."""
        return cls(int(is_equal), int(not is_equal))


_KINDS = {
    "scalars": ("step's scalars", "steps' scalars"),
    "tensors": ("sent tensor", "sent tensors"),
    "slots": ("slot", "slots"),
    "states": ("state", "states"),
}
"""By their names in `ReplayProof`, how a line counts them."""


@dataclasses.dataclass(frozen=True)
class ReplayProof(Document):
    """What was compared in the replay of one rank, or of several.

    Attributes:
        tensors: sent to bystanders, with the hashes that those kept.
        states: the dense state at the end of the window, with the digest in its last slot.
        targets: ranks whose state at the target was compared, by one of the last two.
    """

    scalars: Compared = Compared()
    tensors: Compared = Compared()
    slots: Compared = Compared()
    states: Compared = Compared()
    targets: int = 0
    ranks: int = 1

    @property
    def verified(self) -> bool:
        """Whether nothing differed from the first time."""
        return not any(getattr(self, kind).unequal for kind in _KINDS)

    @property
    def unproven(self) -> int:
        """Ranks of whose final state nothing was left to compare with."""
        return self.ranks - self.targets

    def __add__(self, other: ReplayProof) -> ReplayProof:
        return ReplayProof(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            }
        )

    @property
    def words(self) -> str:
        """What was compared and how that ended, for people."""
        wrong = [
            f"{_count(kind, getattr(self, kind).unequal)} UNEQUAL"
            for kind in _KINDS
            if getattr(self, kind).unequal
        ]
        right = [
            _count(kind, getattr(self, kind).equal) for kind in _KINDS if getattr(self, kind).equal
        ]
        parts = [*wrong, *([f"{', '.join(right)} equal"] if right else [])]
        whose = f"final state compared on {self.targets} of {self.ranks} ranks"
        return "; ".join([*parts, whose] if parts else ["nothing to compare with"])


def proof_of_all(proofs: Iterable[ReplayProof | None]) -> ReplayProof:
    """Returns what was compared by all ranks that replayed; None stands for a bystander."""
    return sum((each for each in proofs if each is not None), ReplayProof(ranks=0))


def _count(kind: str, number: int) -> str:
    singular, plural = _KINDS[kind]
    return f"{number} {singular if number == 1 else plural}"
