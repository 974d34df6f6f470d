# SPDX-License-Identifier: Apache-2.0
"""Bandwidth: what a rank can copy in one iteration."""

from __future__ import annotations

import dataclasses
from datetime import timedelta


@dataclasses.dataclass(frozen=True)
class PathBandwidth:
    """The whole path of a slot: from the device to the host, and over the network to r holders.

    Attributes:
        device_to_host_bytes_per_s: measured, shared with the upstream log.
        network_bytes_per_s: measured, of this rank's share of its node's links.
        replicas: r, the copies that are sent.
        log_bytes: bytes that the upstream log copies to the host in each iteration.

    Raises:
        ValueError: a bandwidth is not positive or a number is negative.
    """

    device_to_host_bytes_per_s: float
    network_bytes_per_s: float
    replicas: int
    log_bytes: int = 0

    def __post_init__(self) -> None:
        if self.device_to_host_bytes_per_s <= 0 or self.network_bytes_per_s <= 0:
            raise ValueError(f"bandwidths must be positive: {self}")
        if self.replicas < 0 or self.log_bytes < 0:
            raise ValueError(f"replicas and log bytes must not be negative: {self}")

    def slot_budget_bytes(self, iteration: timedelta) -> int:
        """Returns the bytes of the largest slot that one iteration hides.

        Both legs run while the next iteration computes: the copy to the host beside the log, and
        the sending of r copies.
        """
        seconds = iteration.total_seconds()
        to_host = self.device_to_host_bytes_per_s * seconds - self.log_bytes
        if self.replicas:
            to_host = min(to_host, self.network_bytes_per_s * seconds / self.replicas)
        return max(int(to_host), 0)

    def hiding_s(self, slot_bytes: int) -> float:
        """Returns the shortest iteration, in seconds, that hides slots of a size."""
        to_host_s = (slot_bytes + self.log_bytes) / self.device_to_host_bytes_per_s
        return max(to_host_s, slot_bytes * self.replicas / self.network_bytes_per_s)
