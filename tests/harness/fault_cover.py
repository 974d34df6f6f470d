# SPDX-License-Identifier: Apache-2.0
"""Jobs that lose processes by every kind of fault, in every phase of a step, on every kind of rank.

Each job is struck twice: by a fault that happens to a process at an instruction, and by a SIGKILL
from outside at a random time. Which comes first, and whom the second strikes, are factors, too, so
at least half of all kills come from outside. In two of three jobs the window schedule changes, and
the fault happens at a moment of that change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.settings.faults import Fault, FaultPoint
from megatron_moevement.testing.lost_states import LostStates
from tests.harness.combinations import Combination
from tests.harness.pairwise import Pair, Ties, cover_pairs
from tests.harness.planned_change import BY_INDEX, OTHER_WINDOWS, Change, Moment, PlannedChange

UNTIED = "--untie-embeddings-and-output-weights"
"""Two stages that share an embedding replay together, which would be all stages of two."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """An arrangement of ranks.

    Attributes:
        base: the layout of `combinations` that it starts from.
        stages: of the pipeline.
        ranks_per_stage: tensor, data and expert peers.
        passes: forward passes of a rank in a step.
        flags: that come after those of the base and win.
    """

    base: str
    stages: int
    ranks_per_stage: int
    passes: int
    flags: str = ""

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.stages * self.ranks_per_stage


_THREE = "--pipeline-model-parallel-size=3 --num-layers=3"
LAYOUTS = {
    "pp2-ep2": Layout("pp2-ep2", 2, 2, 3),
    "pp3-dp2": Layout("pp2-ep2", 3, 2, 3, f"{_THREE} --expert-model-parallel-size=1"),
    "vpp2": Layout("vpp2", 2, 1, 12),
    "pp3-dp2-ep2": Layout("pp2-ep2", 3, 4, 3, f"{_THREE} --micro-batch-size=1"),
    "tp2-pp2": Layout("tp2", 2, 2, 3, "--pipeline-model-parallel-size=2"),
}
LARGE = "pp3-dp2-ep2"
"""Of this layout there are few cases: a job of it takes minutes."""
TENSOR = "tp2-pp2"
"""Of this one there are few, too: its peers share every tensor that crosses a boundary."""
TRAININGS = {
    "bf16-distributed": "bf16 distributed grouped",
    "fp32-replicated": "fp32 replicated bias",
    "fp16-overlap": "fp16 distributed-overlap seq-aux",
    "bf16-recomputed": "bf16 replicated-overlap recomputed",
}
"""Precision, optimizer, experts and the rest, as levels of `combinations`."""
PHASES = {
    "forward": (FaultPoint.FORWARD, FaultPoint.FORWARD_BACKWARD),
    "boundary-send": (FaultPoint.BOUNDARY_SEND,),
    "backward": (FaultPoint.BACKWARD,),
    "reduction": (FaultPoint.FINALIZE, FaultPoint.AFTER_FINALIZE, FaultPoint.PREPARE),
    "barrier": (FaultPoint.BARRIER, FaultPoint.AFTER_BARRIER),
    "commit": (
        FaultPoint.COMMIT,
        FaultPoint.AFTER_OPTIMIZERS,
        FaultPoint.LEDGER,
        FaultPoint.COMMITTED,
        FaultPoint.OPTIMIZERS,
    ),
    "gather": (FaultPoint.GATHER,),
    "snapshot": (FaultPoint.CAPTURE, FaultPoint.COPY, FaultPoint.PUBLISH, FaultPoint.AFTER_PUBLISH),
    "replicate": (FaultPoint.SEND,),
    "window-edge": (FaultPoint.WINDOW_EDGE,),
    "save": (FaultPoint.SAVE,),
}
"""The places of each phase of a step; the rows of a phase take turns at them."""
FACTORS: Mapping[str, list[str]] = {
    "kind": [kind.value for kind in FaultKind],
    "phase": list(PHASES),
    "layout": [name for name in LAYOUTS if name not in {LARGE, TENSOR}],
    "stage": ["first", "middle", "last"],
    "peer": ["first", "last"],
    "order": ["outside-second", "outside-first"],
    "other": ["same-stage", "neighbour"],
    "training": list(TRAININGS),
    "window": ["4", "3", "2"],
    "change": [change.value for change in Change],
    "moment": [moment.value for moment in Moment],
}
"""What happens to a process, where in a step; which layout, stage and rank of the stage it is of;
whether the kill from outside comes before or after, and to which stage; what is trained; and what
of the window schedule changes, and when in that the process is struck."""


def _cell(one: str, one_level: str, other: str, other_level: str) -> Pair:
    return (one, one_level), (other, other_level)


IMPOSSIBLE: Mapping[Pair, str] = {
    _cell("layout", "pp2-ep2", "stage", "middle"): "two stages: none is in the middle",
    _cell("layout", "vpp2", "stage", "middle"): "two stages: none is in the middle",
    _cell("layout", "vpp2", "peer", "last"): "a stage is one rank",
    _cell("phase", "window-edge", "moment", "proposed"): "a change begins with a window, no later",
    _cell("phase", "window-edge", "moment", "agreed"): "the third step begins one with W = 2 alone",
    _cell("window", "2", "change", "order"): "with expert parallelism two slots have room for one",
    **{
        _cell("change", change.value, "moment", moment.value): "a change has moments, none has none"
        for change in Change
        for moment in Moment
        if (change is Change.NONE) != (moment is Moment.NONE)
    },
}
"""The cells that can't occur, each with the reason."""

_LAG = 10
"""Steps that a job may train from the moment of a kill until it is really killed."""
TRAIN_ITERS = 38
_TORN = frozenset({*PHASES["commit"], FaultPoint.WINDOW_EDGE, FaultPoint.CAPTURE})
_ON_A_THREAD = frozenset({FaultPoint.COPY, FaultPoint.PUBLISH, FaultPoint.AFTER_PUBLISH})
_WITHOUT_LOGS = "--moevement-no-upstream-log"


@dataclasses.dataclass(frozen=True)
class Row:
    """One job and its two faults; levels of the factors by name.

    Attributes:
        kind: what happens to the process that is struck at an instruction.
        phase: where in a step.
        layout: of the ranks.
        stage: that it belongs to.
        peer: its place among the peers of the stage.
        order: whether the kill from outside comes before or after.
        other: whom that one strikes, seen from the first.
        training: what is trained.
        window: W at the start.
        change: of the window schedule.
        moment: of the change, in which the process is struck.
        turn: which place of the phase, and how many copies of a slot there are.
        is_global: whether nothing is logged at stage boundaries, so that all stages replay.
    """

    kind: str
    phase: str
    layout: str
    stage: str
    peer: str
    order: str
    other: str
    training: str
    window: str
    change: str
    moment: str
    turn: int = 0
    is_global: bool = False

    @property
    def name(self) -> str:
        """A name for a test."""
        where = (self.place.value, self.layout, self.stage, self.peer)
        when = () if self.planned is None else (self.change, self.moment)
        ends = (f"w{self.window}", *when, *(["global"] if self.is_global else []))
        outside = f"outside{1 if self.is_outside_first else 2}"
        return "-".join([self.kind, *where, outside, self.other, self.training, *ends])

    @property
    def arranged(self) -> Layout:
        """The layout."""
        return LAYOUTS[self.layout]

    @property
    def is_outside_first(self) -> bool:
        """Whether the kill from outside comes first."""
        return self.order == "outside-first"

    @property
    def place(self) -> FaultPoint:
        """Where the process is struck."""
        places = PHASES[self.phase]
        if "fp16" in self.training:  # a step that overflows has nothing to optimize
            places = tuple(place for place in places if place is not FaultPoint.OPTIMIZERS)
        return places[self.turn % len(places)]

    @property
    def planned(self) -> PlannedChange | None:
        """The change of the window schedule; None where nothing changes."""
        change = Change(self.change)
        if change is Change.NONE:
            return None
        quiet_from = self.protected_from + self.is_outside_first * _LAG
        return PlannedChange(change, int(self.window), quiet_from)

    @property
    def protected_from(self) -> int:
        """A step whose commit means that a window is persisted: the ring has no more room."""
        size = int(self.window)
        largest = max(size, OTHER_WINDOWS[size]) if self.change == Change.WINDOW.value else size
        return 2 * largest + 1

    @property
    def step(self) -> int:
        """The step in which the process is struck, behind a persisted window."""
        is_edge = self.phase == "window-edge"
        if self.planned is not None:
            return self.planned.step(Moment(self.moment), begins_window=is_edge)
        first = self.protected_from + 1 + self.is_outside_first * _LAG
        size = int(self.window)
        return -(-first // size) * size if is_edge else first

    @property
    def lost_stage(self) -> int:
        """The stage of the process that is struck."""
        return {"first": 0, "middle": 1, "last": self.arranged.stages - 1}[self.stage]

    @property
    def rank(self) -> int:
        """The logical rank that is struck."""
        size = self.arranged.ranks_per_stage
        return self.lost_stage * size + (size - 1 if self.peer == "last" else 0)

    @property
    def fault(self) -> Fault:
        """What strikes it."""
        return Fault(
            self.step,
            self.place,
            frozenset({self.rank}),
            int(self.is_outside_first),
            FaultKind(self.kind),
        )

    @property
    def is_deadly(self) -> bool:
        """Whether the fault ends the process; an exception ends a generation only."""
        return FaultKind(self.kind) is not FaultKind.EXCEPTION

    @property
    def restarts(self) -> bool:
        """Whether the fault ends a generation; a thread that sends costs a copy only."""
        return self.is_deadly or self.place is not FaultPoint.SEND

    @property
    def spares(self) -> int:
        """Processes that wait, one for each that is lost."""
        return 1 + self.is_deadly

    @property
    def replicas(self) -> int:
        """Copies of a slot, r."""
        return 1 + self.turn % 2

    @property
    def verdicts(self) -> frozenset[str]:
        """What the recovery from the fault may come down to.

        A process that lives has its state, unless the exception hit its commit. One that a thread
        of it raised reaches the training thread in the next step, before its commit or in it.
        """
        if self.is_deadly or self.place in _TORN:
            return frozenset({self.replayed})
        return frozenset({"RESUME", self.replayed} if self.place in _ON_A_THREAD else {"RESUME"})

    @property
    def replayed(self) -> str:
        """The verdict where a state is lost."""
        return "GLOBAL" if self.is_global else "LOCALIZED"

    def other_rank(self, random: Random) -> int:
        """Draws the logical rank that is killed from outside."""
        size = self.arranged.ranks_per_stage
        stage = self.lost_stage
        if self.other == "neighbour":
            last = self.arranged.stages - 1
            stage = random.choice([one for one in (stage - 1, stage + 1) if 0 <= one <= last])
        return stage * size + random.randrange(size)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the job, whether it is protected or not; without data and length."""
        levels = f"{self.arranged.base} {TRAININGS[self.training]}"
        return (*Combination.of(levels).flags, *self.arranged.flags.split(), UNTIED)

    @property
    def protection(self) -> tuple[str, ...]:
        """Flags that protect it and strike it."""
        save = (f"--save-interval={self.step}",) if self.phase == "save" else ()
        change = (BY_INDEX,) if self.planned is None else self.planned.flags
        return (
            "--moevement-strategy=moevement",
            f"--moevement-window={self.window}",
            f"--moevement-replicas={self.replicas}",
            "--moevement-faults",
            str(self.fault),
            *LostStates.REPLAYED.flags,
            *([_WITHOUT_LOGS] if self.is_global else []),
            *change,
            *save,
        )


def _rows(levels: Iterable[Mapping[str, str]], *, is_global: bool = False) -> tuple[Row, ...]:
    turns = dict.fromkeys(PHASES, -1)
    rows = []
    for one in levels:
        turns[one["phase"]] += 1
        named: dict[str, Any] = {**one}
        rows.append(Row(**named, turn=turns[one["phase"]], is_global=is_global))
    return tuple(rows)


COVER = _rows(cover_pairs(FACTORS, IMPOSSIBLE, Ties.RAREST))
"""Every two levels of two factors meet in a row of these, but for the impossible cells."""


def _named(*rows: str, is_global: bool = False) -> tuple[Row, ...]:
    levels = (dict(zip(FACTORS, row.split(), strict=True)) for row in rows)
    return _rows(levels, is_global=is_global)


LARGE_ROWS = _named(
    f"kill backward {LARGE} middle last outside-second neighbour bf16-distributed 4 none none",
    f"stop reduction {LARGE} last first outside-second same-stage bf16-distributed 2 none none",
    f"exception commit {LARGE} middle first outside-first neighbour bf16-distributed 4 none none",
    f"exit replicate {LARGE} first last outside-first same-stage bf16-distributed 2 none none",
    f"segfault barrier {LARGE} last last outside-second neighbour bf16-distributed 4 none none",
    f"kill commit {LARGE} middle first outside-second same-stage bf16-distributed 4 window agreed",
    f"kill snapshot {LARGE} last last outside-second neighbour bf16-distributed 2 window slots",
)
"""Every kind of fault and every stage of the largest layout, and changes of W.

Each order of its experts gives the same slots."""
TENSOR_ROWS = _named(
    f"kill commit {TENSOR} first last outside-second neighbour bf16-distributed 4 none none",
    f"stop backward {TENSOR} last first outside-first same-stage fp16-overlap 2 none none",
    f"exception commit {TENSOR} last last outside-second same-stage fp32-replicated 4 none none",
    f"exit gather {TENSOR} first first outside-second neighbour fp16-overlap 2 none none",
    f"segfault reduction {TENSOR} last first outside-first neighbour bf16-recomputed 4 none none",
    f"kill barrier {TENSOR} first first outside-second neighbour fp32-replicated 2 window proposed",
    f"kill window-edge {TENSOR} last last outside-first same-stage fp32-replicated 3 window edge",
    f"kill commit {TENSOR} first last outside-second same-stage fp16-overlap 4 order agreed",
)
"""Every kind of fault, both stages, both peers and every training, with tensor peers."""
GLOBAL_ROWS = _named(
    "kill forward pp2-ep2 first last outside-second neighbour bf16-distributed 2 window slots",
    "kill barrier pp2-ep2 last first outside-second same-stage fp32-replicated 4 order proposed",
    "kill commit pp3-dp2 middle first outside-second neighbour bf16-recomputed 4 window agreed",
    "kill window-edge pp3-dp2 last last outside-first same-stage bf16-distributed 3 order edge",
    "kill gather vpp2 last first outside-first neighbour fp16-overlap 2 window unproposed",
    "kill snapshot vpp2 first first outside-second same-stage bf16-distributed 4 window edge",
    f"kill commit {TENSOR} last first outside-second neighbour bf16-recomputed 4 order slots",
    f"kill backward {LARGE} first last outside-first neighbour bf16-distributed 4 window edge",
    is_global=True,
)
"""Every layout and every moment of a change, in jobs that replay as a whole."""
ROWS = (*COVER, *LARGE_ROWS, *TENSOR_ROWS, *GLOBAL_ROWS)
