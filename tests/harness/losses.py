# SPDX-License-Identifier: Apache-2.0
"""Jobs that lose several processes at one moment: which, and what the recovery has to be."""

from __future__ import annotations

import dataclasses
from enum import Enum

from tests.harness.combinations import Combination
from tests.harness.fault_cover import UNTIED


class Memory(Enum):
    """What becomes of what the lost processes kept in memory."""

    STAYS = "stays"
    """As where processes die and their machine does not."""
    LOST = "lost"
    """As where the machine is lost."""


@dataclasses.dataclass(frozen=True)
class Losses:
    """One cell: a job, and whom it loses at once.

    Attributes:
        name: of the test.
        base: levels of `combinations`.
        flags: that come after those of the base and win.
        stages: of the pipeline.
        ranks_per_stage: of the job.
        lost: the ranks whose processes are killed.
        scope: the stages that replay.
        memory: of the lost processes.
        window: W.
        replicas: r.
        domain_size: processes that follow each other in a failure domain.
    """

    name: str
    base: str
    flags: str
    stages: int
    ranks_per_stage: int
    lost: tuple[int, ...]
    scope: tuple[int, ...]
    memory: Memory = Memory.STAYS
    window: int = 3
    replicas: int = 2
    domain_size: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.stages * self.ranks_per_stage

    @property
    def spares(self) -> int:
        """Processes that wait: whole failure domains of them."""
        return -(-len(self.given_up) // self.domain_size) * self.domain_size

    @property
    def given_up(self) -> frozenset[int]:
        """The processes that end: those of the lost ones' domains."""
        domains = {rank // self.domain_size for rank in self.lost}
        return frozenset(
            process for process in range(self.ranks) if process // self.domain_size in domains
        )

    @property
    def verdict(self) -> str:
        """The verdict of the recovery."""
        return "GLOBAL" if len(self.scope) == self.stages else "LOCALIZED"

    @property
    def protected_from(self) -> int:
        """A step whose commit means that a window is persisted: the ring has no more room."""
        return 2 * self.window + 1

    @property
    def train_iters(self) -> int:
        """Steps of the run: enough to be killed and to train on."""
        return self.protected_from + 10

    @property
    def all_flags(self) -> tuple[str, ...]:
        """The flags of the training, its data excepted."""
        return (*Combination.of(self.base).flags, *self.flags.split())


def _pipeline(stages: int, *, chunks: int = 1, untied: bool = True) -> str:
    words = [f"--pipeline-model-parallel-size={stages}", f"--num-layers={stages * chunks}"]
    return " ".join([*words, *([UNTIED] if untied else [])])


_ROW = "edp3 bf16"
"""Flags of a pipeline with one rank per stage, once its stages are given."""
_TIED = _pipeline(4, untied=False)
CELLS = (
    Losses("two-of-a-stage", "pp2-ep2 bf16 distributed", UNTIED, 2, 2, (2, 3), (1,)),
    Losses("adjacent-stages", _ROW, _pipeline(4), 4, 1, (1, 2), (1, 2)),
    Losses("disjoint-stages", _ROW, _pipeline(5), 5, 1, (1, 3), (1, 3)),
    Losses("tied-ends", _ROW, _pipeline(4, untied=False), 4, 1, (0, 3), (0, 3)),
    Losses(
        "tied-ends-and-the-middle", _ROW, _pipeline(4, untied=False), 4, 1, (0, 1, 3), (0, 1, 3)
    ),
    Losses("ends-of-a-ring", "vpp2 bf16", _pipeline(3, chunks=2), 3, 1, (0, 2), (0, 2)),
    Losses("all-at-once", _ROW, _pipeline(2), 2, 1, (0, 1), (0, 1), replicas=1),
    Losses("two-of-three-domains", _ROW, _pipeline(3), 3, 1, (0, 1), (0, 1), Memory.LOST),
    Losses(
        "a-domain",
        "pp2-ep2 bf16 distributed",
        UNTIED,
        2,
        2,
        (2, 3),
        (1,),
        Memory.LOST,
        replicas=1,
        domain_size=2,
    ),
    Losses(
        "one-of-a-domain",
        "pp2-ep2 bf16 distributed",
        UNTIED,
        2,
        2,
        (3,),
        (1,),
        Memory.LOST,
        replicas=1,
        domain_size=2,
    ),
)
"""Every shape of a loss of several processes."""
