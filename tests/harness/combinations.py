# SPDX-License-Identifier: Apache-2.0
"""Combinations of layout, precision, optimizer, experts and the rest that bits are compared in."""

from __future__ import annotations

import dataclasses

from tests.harness.pairwise import cover_pairs
from tests.harness.tiny_job import PLAIN, TINY

CLIP_GRAD = 0.5
"""Below the gradient norms of all combinations."""
_DATA = ("--mock-data", "--tokenizer-type=NullTokenizer", "--vocab-size=96")
_SCHEDULES = (
    f"--clip-grad={CLIP_GRAD}",
    "--lr-warmup-iters=2",
    "--min-lr=1e-4",
    "--start-weight-decay=0.01",
    "--end-weight-decay=0.1",
    "--weight-decay-incr-style=linear",
)
ALWAYS = (*(flag for flag in TINY if flag not in _DATA), *_SCHEDULES)
"""Flags of every combination: clipping, and schedules that change with every step."""
DENSE = (
    *(flag for flag in PLAIN if flag not in _DATA),
    *_SCHEDULES,
    "--hidden-dropout=0",
    "--attention-dropout=0",
)
"""The same of a model without experts."""
OF_EXPERTS = ("experts", "balance", "z-loss", "dispatcher")
"""Factors that such a model has not."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks and their arrangement, with more micro-batches per rank than stages."""

    world_size: int
    flags: str


LAYOUTS = {
    "pp2-ep2": Layout(
        4,
        "--pipeline-model-parallel-size=2 --expert-model-parallel-size=2 --micro-batch-size=2",
    ),
    "pp2-dp2-ep2": Layout(
        8,
        "--pipeline-model-parallel-size=2 --expert-model-parallel-size=2 --micro-batch-size=1",
    ),
    "tp2": Layout(2, "--tensor-model-parallel-size=2 --sequence-parallel --micro-batch-size=4"),
    "tp4": Layout(4, "--tensor-model-parallel-size=4 --sequence-parallel --micro-batch-size=6"),
    "tp2-ep2": Layout(
        2,
        "--tensor-model-parallel-size=2 --sequence-parallel --expert-model-parallel-size=2 "
        "--expert-tensor-parallel-size=1 --micro-batch-size=4",
    ),
    "vpp2": Layout(
        2,
        "--pipeline-model-parallel-size=2 --num-virtual-stages-per-pipeline-rank=2 "
        "--num-layers=4 --micro-batch-size=2",
    ),
    "edp3": Layout(3, "--micro-batch-size=2"),
    "ep2-edp3": Layout(6, "--expert-model-parallel-size=2 --micro-batch-size=1"),
}

SETTINGS: dict[str, dict[str, str]] = {
    "precision": {
        "fp32": "",
        "bf16": "--bf16",
        # Overflows at once, and again when the scale has grown.
        "fp16": "--fp16 --initial-loss-scale=524288 --loss-scale-window=2 --hysteresis=1",
    },
    "optimizer": {
        "replicated": "",
        "replicated-overlap": "--overlap-grad-reduce",
        "distributed": "--use-distributed-optimizer",
        "distributed-overlap": "--use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
    },
    "experts": {"sequential": "", "grouped": "--moe-grouped-gemm"},
    "balance": {
        "aux": "--moe-router-load-balancing-type=aux_loss --moe-aux-loss-coeff=1e-2",
        "seq-aux": "--moe-router-load-balancing-type=seq_aux_loss --moe-aux-loss-coeff=1e-2",
        "global-aux": "--moe-router-load-balancing-type=global_aux_loss --moe-aux-loss-coeff=1e-2",
        "bias": "--moe-router-load-balancing-type=none --moe-router-enable-expert-bias "
        "--moe-router-score-function=sigmoid",
    },
    "dropout": {"dropout": "--hidden-dropout=0.1 --attention-dropout=0.1", "no-dropout": ""},
    "z-loss": {"z-loss": "--moe-z-loss-coeff=1e-3", "no-z-loss": ""},
    "dispatcher": {
        "alltoall": "--moe-token-dispatcher-type=alltoall",
        "allgather": "--moe-token-dispatcher-type=allgather",
    },
    "schedule": {"cosine": "--lr-decay-style=cosine", "linear": "--lr-decay-style=linear"},
    "recompute": {
        "stored": "",
        "recomputed": "--recompute-granularity=full --recompute-method=uniform "
        "--recompute-num-layers=1",
    },
    "evaluation": {"no-evaluation": "", "evaluation": "--eval-iters=1 --eval-interval=2"},
}
"""Flags by factor and level; the first level is the default."""
FACTORS: dict[str, list[str]] = {"layout": list(LAYOUTS)} | {
    name: list(levels) for name, levels in SETTINGS.items()
}


@dataclasses.dataclass(frozen=True)
class Combination:
    """One level of each factor, in the order of the factors.

    Attributes:
        is_dense: whether the model has no experts, so that levels of `OF_EXPERTS` have no effect.
    """

    levels: tuple[str, ...]
    is_dense: bool = False

    @classmethod
    def of(cls, text: str) -> Combination:
        """Reads levels by name, in any order; the others are those that come first.

        The word `dense` leaves the experts out.
        """
        named = [word for word in text.split() if word != "dense"]
        levels = tuple(
            next((one for one in named if one in factor), factor[0]) for factor in FACTORS.values()
        )
        assert set(named) <= set(levels), f"no such level, or two of one factor: {text}"
        return cls(levels, "dense" in text.split())

    @property
    def name(self) -> str:
        """The layout and the levels that are not the default, as a name for a test."""
        layout, *settings = zip(self.levels, FACTORS.values(), strict=True)
        kind = ["dense"] if self.is_dense else []
        return "-".join([layout[0], *kind, *(one for one, levels in settings if one != levels[0])])

    @property
    def world_size(self) -> int:
        """Ranks of a job."""
        return LAYOUTS[self.levels[0]].world_size

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of a job, its data and its length excepted."""
        chosen = dict(zip(SETTINGS, self.levels[1:], strict=True))
        words = [LAYOUTS[self.levels[0]].flags]
        words += [
            SETTINGS[name][level]
            for name, level in chosen.items()
            if not (self.is_dense and name in OF_EXPERTS)
        ]
        return (*(DENSE if self.is_dense else ALWAYS), *" ".join(words).split())


def cover() -> list[Combination]:
    """Returns combinations in which every two levels of two factors meet."""
    return [Combination(tuple(row.values())) for row in cover_pairs(FACTORS)]
