# SPDX-License-Identifier: Apache-2.0
"""What an aborted communicator leaves behind, on its own rank and on its neighbours.

NCCL's kernels that see the abort flag go on, leave their outputs as they happen to be, and post to
their peers all the same. So a rank that was not aborted yet may finish a collective with garbage.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import torch

VARIABLE = "NCCL_LIKE_ABORT"
"""Names an `Abort` as `GARBAGE` or `GARBAGE,neighbours`."""
FOLDER_VARIABLE = "LIKE_NCCL_FOLDER"
"""Where the ranks of a job note which communicators they have aborted."""


class Garbage(Enum):
    """What is in the output of a collective that was aborted."""

    ZEROS = "zeros"
    STALE = "stale"
    """What the communicator's last collective of that size gave, or else what was there before."""
    PARTIAL = "partial"
    """The rank's own input, as if nobody else had taken part."""


@dataclasses.dataclass(frozen=True)
class Abort:
    """How communicators of a job end.

    Attributes:
        garbage: what they leave in their outputs.
        neighbours: whether the collectives of ranks that were not aborted yet end so, too.
        folder: shared by all ranks of the job, and of no other.
    """

    garbage: Garbage
    neighbours: bool
    folder: Path

    @classmethod
    def from_environment(cls) -> Abort:
        """Returns what the variables say; by default zeros, and neighbours that wait."""
        garbage, _, neighbours = os.environ.get(VARIABLE, Garbage.ZEROS.value).partition(",")
        return cls(Garbage(garbage), bool(neighbours), Path(os.environ[FOLDER_VARIABLE]))

    def note(self, communicator: str) -> None:
        """Notes that this rank aborts a communicator."""
        (self.folder / communicator).touch()

    def is_noted(self, communicator: str) -> bool:
        """Returns whether any rank has aborted a communicator."""
        return self.neighbours and (self.folder / communicator).exists()

    def spoil(
        self,
        outputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
    ) -> None:
        """Writes garbage into outputs.

        Args:
            own: what the rank put in.
            before: the outputs of the communicator's last collective.
        """
        for index, output in enumerate(outputs):
            if self.garbage is Garbage.ZEROS:
                output.zero_()
            elif self.garbage is Garbage.STALE and index < len(before):
                _fill(output, before[index])
            elif self.garbage is Garbage.PARTIAL and index < len(own):
                _fill(output, own[index])


def _fill(output: torch.Tensor, other: torch.Tensor) -> None:
    if other.numel() == output.numel() and other.dtype == output.dtype:
        output.copy_(other.reshape(output.shape))
