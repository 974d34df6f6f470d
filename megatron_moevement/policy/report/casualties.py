# SPDX-License-Identifier: Apache-2.0
"""Casualties: which processes an outage, or the end of a job, began with, and on which hosts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_moevement.policy.accounting.job import KEPT_CODE, Job, Launch

HAS_ENDED = "its process has ended"
"""The reason that others have where there is no more to it than its end."""
NAMED = 64
"""So many casualties of one outage are listed; they begin with the first."""
_TOGETHER_US = 5_000_000
"""Processes that end within this time of the first one have ended with it, others after it."""

_RANKS = 8
"""So many are named of a host that lost several."""

Describe = Callable[[int], str]
"""Returns how a process ended, from its exit code."""


@dataclasses.dataclass(frozen=True)
class Casualty:
    """A process that was lost.

    Attributes:
        rank: that it had; None for a spare.
        host: None where no event names it.
        at_us: when it ended, in microseconds since the epoch; None where that is not recorded.
        end: how it ended, in words; None where that is not recorded.
        reason: why others gave it up; None where none did.
    """

    process: int
    rank: int | None
    host: str | None
    pid: int | None = None
    at_us: int | None = None
    end: str | None = None
    reason: str | None = None

    @property
    def line(self) -> str:
        """All of it, for people."""
        place = "a spare" if self.rank is None else f"rank {self.rank}"
        host = "" if self.host is None else f" on {self.host}"
        who = f"{place}{host} (process {self.process})"
        if self.end is None:
            return f"{who} was lost" if self.reason is None else f"{who}: {self.reason}"
        is_told = self.reason is None or self.reason.startswith(HAS_ENDED)
        return f"{who} {self.end}" + ("" if is_told else f" ({self.reason})")


def lost_in_place(
    losses: Iterable[Mapping[str, Any]], launch: Launch, describe: Describe
) -> list[Casualty]:
    """Returns who was lost, as the survivors found it and with how it ended, by time.

    Args:
        losses: of the events of a restart.
        launch: whose processes they were.
    """
    found = []
    for loss in losses:
        number = int(loss["process"])
        life = launch.lives.get(number)
        ended = life is not None and life.code is not None
        end = describe(life.code) if life is not None and life.code is not None else loss.get("end")
        found.append(
            Casualty(
                process=number,
                rank=loss["rank"],
                host=loss["host"],
                pid=None if life is None else life.pid,
                at_us=life.ended_us if life is not None and ended else None,
                end=end,
                reason=loss["reason"],
            )
        )
    return sorted(found, key=lambda one: (one.at_us is None, one.at_us or 0, one.process))


def lost_at_end(launch: Launch, since_us: int, describe: Describe) -> list[Casualty]:
    """Returns which processes of a launch ended badly by themselves from a time on, by time.

    Those that stopped for others are left out, and those that ended long after the first one: a
    launcher ends what is left of a job.
    """
    ended = sorted(
        (life.ended_us, number, life)
        for number, life in launch.lives.items()
        if life.ended_us is not None and life.code and life.ended_us >= since_us
    )
    own = [one for one in ended if one[2].code != KEPT_CODE]
    return [
        Casualty(
            process=number,
            rank=life.ranks[-1] if life.ranks else None,
            host=life.host,
            pid=life.pid,
            at_us=at_us,
            end=describe(life.code or 0),
        )
        for at_us, number, life in own
        if at_us <= own[0][0] + _TOGETHER_US
    ]


def summary(casualties: Sequence[Casualty]) -> str | None:
    """Returns the first casualty in words, and how many there were more; None where none is known.

    Where a host lost several processes, it is named with their ranks.
    """
    if not casualties:
        return None
    first = casualties[0]
    together = [one for one in casualties if one.host is not None and one.host == first.host]
    if len(together) > 1:
        ranks = ", ".join(str(one.rank) for one in together[:_RANKS] if one.rank is not None)
        more = " ..." if len(together) > _RANKS else ""
        text = f"{first.host} lost {len(together)} processes (ranks {ranks}{more}): {first.line}"
    else:
        text = first.line
    rest = len(casualties) - max(1, len(together))
    return text if not rest else f"{text}, and {rest} more"


def how_it_ended(job: Job, since_us: int, describe: Describe) -> Mapping[str, Any]:
    """Returns how the newest launch of a job ended, and what it ended with.

    Args:
        since_us: when it trained last after a fault; what was lost before is of that fault.
    """
    launch = job.launches[-1]
    codes = Counter(life.code for life in launch.lives.values() if life.code is not None)
    if launch.ended_well:
        code: int | None = 0
    elif KEPT_CODE in codes:
        code = KEPT_CODE
    else:
        code = min(codes, key=lambda one: (-codes[one], one), default=None)
    casualties = [] if code in {0, None} else lost_at_end(launch, since_us, describe)
    return {
        "code": code,
        "words": None if code is None else describe(code),
        "recorded": sum(codes.values()),
        "processes": len(launch.lives),
        "casualties": casualties,
    }
