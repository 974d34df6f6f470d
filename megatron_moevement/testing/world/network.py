# SPDX-License-Identifier: Apache-2.0
"""The network of a simulated cluster: boundary tensors and collectives, cut anywhere."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_moevement.policy.job.boundary import BoundaryTag
from megatron_moevement.testing.world.process import Join, Process

if TYPE_CHECKING:
    from megatron_moevement.testing.world.world import World

BOUNDARY_TIME = 0.2
COLLECTIVE_TIME = 0.3


@dataclasses.dataclass
class Meeting:
    """A collective under way.

    Attributes:
        values: contributions of those who came.
        waiting: who waits for the result.
        is_cut: whether a member died: the others may or may not get the result.
    """

    values: dict[Any, Any] = dataclasses.field(default_factory=dict)
    waiting: list[Process] = dataclasses.field(default_factory=list)
    is_cut: bool = False


class Network:
    """Delivers what processes send each other for training."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._meetings: dict[tuple[Any, ...], Meeting] = {}
        self._open: dict[int, Meeting] = {}

    def send_boundary(
        self, sender: Process, stage: int, tag: BoundaryTag, value: int, late: float = 0.0
    ) -> None:
        """Sends a boundary tensor to the rank of a stage with the same other coordinates."""
        receiver = self._world.neighbour(sender, stage)
        if receiver is None:
            return
        delay = BOUNDARY_TIME * (1 + self._world.random.random()) + late
        self._world.clock.after(
            delay, self._deliver_boundary, sender, receiver, tag, value, sender.generation
        )

    def _deliver_boundary(
        self, sender: Process, receiver: Process, tag: BoundaryTag, value: int, sent_in: int
    ) -> None:
        if not sender.alive and self._world.random.random() < 0.5:
            return
        if not self._world.policies.is_current(sent_in, receiver.generation):
            return
        receiver.mailbox[tag] = value
        self._world.poke(receiver)

    def join(self, process: Process, join: Join) -> None:
        """Lets a process come to a collective; the last one completes it for all."""
        name = (process.generation, *join.name)
        meeting = self._meetings.setdefault(name, Meeting())
        meeting.values[join.me] = join.value
        meeting.waiting.append(process)
        self._open[process.number] = meeting
        if not join.suffice(len(meeting.values), len(join.members)):
            return
        if len(meeting.values) == len(join.members):
            del self._meetings[name]
        result = join.combine(meeting.values)
        waiting, meeting.waiting = meeting.waiting, []
        for member in waiting:
            delay = COLLECTIVE_TIME * (1 + self._world.random.random())
            self._world.clock.after(delay, self._finish, member, meeting, result, join)

    def _finish(self, process: Process, meeting: Meeting, result: Any, join: Join) -> None:
        if self._open.get(process.number) is not meeting:
            return
        if meeting.is_cut and self._world.random.random() < 0.5:
            return
        del self._open[process.number]
        if not isinstance(process.wait, Join) or process.wait.name != join.name:
            return
        self._world.resume(process, result)

    def forget(self, process: Process) -> None:
        """Takes a process out of every collective: it was interrupted or is dead."""
        meeting = self._open.pop(process.number, None)
        if meeting is not None:
            meeting.is_cut = True

    def forget_generation(self, generation: int) -> None:
        """Removes what a generation left unfinished."""
        for name in [name for name in self._meetings if name[0] < generation]:
            del self._meetings[name]

    @property
    def unfinished(self) -> list[tuple[Any, ...]]:
        """Collectives that not all members came to."""
        return list(self._meetings)
