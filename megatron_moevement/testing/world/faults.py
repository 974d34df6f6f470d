# SPDX-License-Identifier: Apache-2.0
"""Faults: what goes wrong in a simulated world, and when."""

from __future__ import annotations

import dataclasses
from enum import Enum

from megatron_moevement.settings.faults import FaultPoint


class FaultKind(Enum):
    """What goes wrong."""

    CRASH = "crash"
    """A process dies."""

    EXCEPTION = "exception"
    """A process stops where it is, and lives; everybody is interrupted."""

    HANG = "hang"
    """A process stops; the wrapper kills it after a long silence."""

    HICCUP = "hiccup"
    """Transfers from a process to everybody else fail for a while; it notices nothing else."""

    NODE = "node"
    """All processes of a failure domain die, and the memory of the node with them."""

    TORN = "torn"
    """A commit is cut in the middle; the process lives, its state is worthless."""

    FALSE_ALARM = "false-alarm"
    """Everybody is interrupted although nobody died."""

    CORRUPT_SLOT = "corrupt-slot"
    """Bits flip in a slot that a process holds."""

    CORRUPT_LOG = "corrupt-log"
    """Bits flip in a logged boundary tensor."""

    CONTROL_STORE = "control-store"
    """The process that hosts the control store dies: all exit and are launched again."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: what goes wrong.
        tick: the command of the world, counted from 0, right before which it happens.
        victim: chooses the process among the live ones, modulo their number; -1 is the process
            whose command it is.
        place: it happens when a process first comes to this place from that command on; None:
            at that command.
    """

    kind: FaultKind
    tick: int
    victim: int = -1
    place: FaultPoint | None = None
