# SPDX-License-Identifier: Apache-2.0
"""Reading pace: how fast memory may be read that nobody waits for."""

from __future__ import annotations

import dataclasses

_RATE_BYTES_PER_S = 256 << 20
_CPU_SHARE = 1 / 256


@dataclasses.dataclass(frozen=True)
class ReadingPace:
    """Bounds what reading takes from the training beside it.

    Attributes:
        rate_bytes_per_s: of memory, at most, however idle the processor is.
        cpu_share: of the processor time of the process, at most.
    """

    rate_bytes_per_s: int = _RATE_BYTES_PER_S
    cpu_share: float = _CPU_SHARE

    def pause_s(self, size_bytes: int) -> float:
        """Returns how long to wait before so many bytes are read."""
        return size_bytes / self.rate_bytes_per_s

    def debt_s(self, spent_s: float, passed_s: float) -> float:
        """Returns the processor time that has to pass before anything is read, zero for none.

        Args:
            spent_s: processor time that reading has taken.
            passed_s: that the process has taken meanwhile, reading included.
        """
        return max(0.0, spent_s / self.cpu_share - passed_s)
