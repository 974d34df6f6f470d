# SPDX-License-Identifier: Apache-2.0
"""What happens to a job: its launches, and who is struck in each, where and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_moevement.policy.faults.fault_schedule import FaultKind
from megatron_moevement.settings.faults import Fault


@dataclasses.dataclass(frozen=True)
class Kill:
    """SIGKILL from outside, to several processes at one moment.

    Attributes:
        step: after whose first report in the launch; 0: after the start of the launch.
        ranks: whose processes; by their numbers while none has a rank yet. None: every process of
            the job, spares too, which ends the launch.
        after_s: so much later.
        forgets: whether what they kept in memory is lost with them, as with their machines.
    """

    step: int
    ranks: tuple[int, ...] | None
    after_s: float
    forgets: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it kills all processes."""
        return self.ranks is None


@dataclasses.dataclass(frozen=True)
class Launch:
    """One start of the job.

    Attributes:
        spares: processes more than ranks.
        faults: that strike at a place of a step.
        kills: from outside, in the order of their steps.
    """

    spares: int = 0
    faults: tuple[Fault, ...] = ()
    kills: tuple[Kill, ...] = ()

    @property
    def ends_whole(self) -> bool:
        """Whether all processes are killed in it."""
        return any(kill.is_whole for kill in self.kills)

    @property
    def stops(self) -> bool:
        """Whether a process hangs in it."""
        return any(fault.kind is FaultKind.STOP for fault in self.faults)


@dataclasses.dataclass(frozen=True)
class History:
    """The launches of a job, one after the other, until one comes to the end."""

    launches: tuple[Launch, ...]

    @property
    def strikes(self) -> int:
        """Faults and kills of all launches."""
        return sum(len(launch.faults) + len(launch.kills) for launch in self.launches)


def dump_history(history: History) -> list[dict[str, Any]]:
    """Returns a history as what JSON can hold."""
    return [
        {
            "spares": launch.spares,
            "faults": [str(fault) for fault in launch.faults],
            "kills": [dataclasses.asdict(kill) for kill in launch.kills],
        }
        for launch in history.launches
    ]


def load_history(document: list[Mapping[str, Any]]) -> History:
    """Returns the history of a document.

    Raises:
        ValueError: a fault is none.
        KeyError: something is missing.
    """
    return History(
        tuple(
            Launch(
                launch["spares"],
                tuple(Fault.parse(fault) for fault in launch["faults"]),
                tuple(_load_kill(kill) for kill in launch["kills"]),
            )
            for launch in document
        )
    )


def _load_kill(document: Mapping[str, Any]) -> Kill:
    ranks = document["ranks"]
    return Kill(
        document["step"],
        None if ranks is None else tuple(ranks),
        document["after_s"],
        document["forgets"],
    )
