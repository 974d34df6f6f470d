# SPDX-License-Identifier: Apache-2.0
"""What becomes of a lost state of which replicas survive."""

from __future__ import annotations

from enum import Enum


class LostStates(Enum):
    """How a run gets back what a lost rank held."""

    REPLAYED = "replayed"
    """Always: most tests are about replays, and a copy has the right bits whatever they do."""

    COPIED = "copied"
    """From a replica, where one is left."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of such a run."""
        return ("--moevement-no-replica-copy",) if self is LostStates.REPLAYED else ()
