# SPDX-License-Identifier: Apache-2.0
"""Signs of life of a rank to whoever watches it from outside: sections of its work, heartbeats.

The training thread says what begins and what ends, and how long each took is noted here. `Watch`
itself tells nobody; what a launcher's monitor is told is in `integrations/nvrx/rank_monitor.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

from megatron_moevement.policy.watching.section_limits import OUTSIDE

if TYPE_CHECKING:
    import torch


class Section(Enum):
    """A part of the work that may take so long and no longer; named as in Megatron-LM."""

    SETUP = "setup"
    """From the start of the process, or of a generation, to the first step."""

    STEP = "step"
    """A step, also a replayed one, or an iteration of an evaluation."""

    CHECKPOINTING = "checkpointing"
    """A durable checkpoint is saved."""


class Work(Enum):
    """What a step is part of."""

    TRAINING = "training"
    EVALUATION = "evaluation"


class Moment(Enum):
    """When limits are learned."""

    SAVED = "saved"
    END = "end"
    """Only now everything outside of sections has been seen."""


_ENOUGH_STEPS = 16
"""Before so many steps nobody knows how long a step may take."""


class Watch:
    """Nobody watches. Used by the training thread."""

    def __init__(self, warm_up: int = 0) -> None:
        """Begins outside of all sections.

        Args:
            warm_up: steps of each work that are no section: they may be slower.
        """
        self._warm_up = warm_up
        self._steps: Counter[Work] = Counter()
        self._saves = 0
        self._has_loaded = False
        self._open: Section | None = None
        self._since_s = time.monotonic()
        self._longest_s: dict[str, float] = {}

    def restart(self) -> None:
        """Begins the set-up: at the start, and after whatever interrupt."""
        self._open = Section.SETUP
        self._since_s = time.monotonic()

    def loaded(self) -> None:
        """Notes that the set-up includes the loading of a durable checkpoint."""
        self._has_loaded = True

    def begin_step(self, work: Work = Work.TRAINING) -> None:
        """Begins a step; the set-up is over with the first."""
        self.beat()
        if self._open is Section.SETUP:
            self._end(Section.SETUP)
        if self._steps[work] >= self._warm_up:
            self._begin(Section.STEP)

    def end_step(self, work: Work = Work.TRAINING) -> None:
        """Ends it."""
        if self._open is Section.STEP:
            self._end(Section.STEP)
        self._steps[work] += 1

    def begin_evaluation(self) -> None:
        """Begins an evaluation, whose first iterations are slower again."""
        self._steps[Work.EVALUATION] = 0

    def begin_save(self) -> None:
        """Begins to save a checkpoint."""
        self.beat()
        if self._open is Section.SETUP:
            self._end(Section.SETUP)
        self._begin(Section.CHECKPOINTING)

    def end_save(self, beside: timedelta | None = None) -> None:
        """Ends it, or a part of one that is written beside training.

        Args:
            beside: how long that one was written; the next may have to wait as long for its end.
        """
        self._end(Section.CHECKPOINTING)
        name = Section.CHECKPOINTING.value
        if beside is not None:
            self._longest_s[name] = max(self._longest_s[name], beside.total_seconds())
        self._saves += 1

    def longest_s(self, moment: Moment) -> Mapping[str, float | None]:
        """Returns the longest time of each section, None where too little was seen of it."""
        enough = {
            Section.SETUP.value: self._has_loaded,
            Section.STEP.value: self._steps[Work.TRAINING] >= _ENOUGH_STEPS,
            Section.CHECKPOINTING.value: self._saves > 0,
        }
        enough[OUTSIDE] = moment is Moment.END and all(enough.values())
        return {name: self._longest_s.get(name) if enough[name] else None for name in enough}

    def learn(self, moment: Moment, device: torch.device) -> None:
        """Learns limits from what all ranks have seen; every rank calls it, in step."""

    def beat(self) -> None:
        """Says that the rank lives."""

    def opened(self, section: Section) -> None:
        """Says that a section begins."""

    def closed(self, section: Section) -> None:
        """Says that a section ends."""

    def close(self) -> None:
        """Says nothing any more."""

    def _begin(self, section: Section) -> None:
        self._note(OUTSIDE)
        self._open = section
        self.opened(section)

    def _end(self, section: Section) -> None:
        self._note(section.value)
        self._open = None
        self.closed(section)

    def _note(self, name: str) -> None:
        now_s = time.monotonic()
        self._longest_s[name] = max(self._longest_s.get(name, 0.0), now_s - self._since_s)
        self._since_s = now_s
