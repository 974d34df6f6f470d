# SPDX-License-Identifier: Apache-2.0
"""What a survivor has measured of an outage before it is in its new generation.

Pure: times of one process's clock go in, in seconds since the epoch.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class OutageBegin:
    """The parts of an outage from the end of the last step until the ranks have met again.

    Attributes:
        noticed_s: when this process was interrupted; not before the end of its last step, since
            that step has still ended.
    """

    noticed_s: float
    detect_s: float
    teardown_s: float
    rendezvous_s: float

    @classmethod
    def between(
        cls, noticed_s: float, stepped_s: float | None, entered_s: float, joined_s: float
    ) -> OutageBegin:
        """Returns the parts.

        Args:
            stepped_s: when its last step ended; None before any.
            entered_s: when it began to look for the others.
            joined_s: when all had met.
        """
        stepped_s = noticed_s if stepped_s is None else stepped_s
        noticed_s = max(noticed_s, stepped_s)
        return cls(noticed_s, noticed_s - stepped_s, entered_s - noticed_s, joined_s - entered_s)

    @property
    def durations_s(self) -> dict[str, float]:
        """By name, in the order of time."""
        return {
            "detect": self.detect_s,
            "teardown": self.teardown_s,
            "rendezvous": self.rendezvous_s,
        }
