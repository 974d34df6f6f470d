# SPDX-License-Identifier: Apache-2.0
"""Metrics: the figures by which a job is watched, their names and their meaning."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What may become of a figure."""

    GAUGE = "gauge"
    COUNTER = "counter"
    """It only grows, while its process lives."""


@dataclasses.dataclass(frozen=True)
class Description:
    """What a metric is.

    Attributes:
        name: without the prefix of all of them, and without what counters end with.
        meaning: in one sentence.
        label: that tells its figures apart; None where there is one figure.
    """

    name: str
    meaning: str
    label: str | None = None
    kind: Kind = Kind.GAUGE


class Metric(Enum):
    """The metrics of a job."""

    COMMITTED_STEP = Description("committed_step", "newest step that a rank recorded")
    LAST_STEP = Description(
        "last_step_timestamp_seconds", "when that step ended, in seconds since the epoch"
    )
    LOSS = Description("lm_loss", "loss of the newest step")
    ITERATION = Description("iteration_seconds", "from one step to the next, on rank 0")
    STALL = Description(
        "stall_seconds", "wait of a step for what protects it, on the rank that waits longest"
    )
    ETTR = Description(
        "effective_training_time_ratio",
        "useful time of rank 0 by the time since the start of the first launch",
    )
    LAUNCHES = Description("launches", "launches of the job, by their names", kind=Kind.COUNTER)
    GENERATION = Description("generation", "restarts in place of this launch")
    RANKS = Description("ranks", "ranks that have joined the present generation")
    SPARES = Description("spares", "processes that wait for a place, when a window was persisted")
    PROTECTION = Description(
        "protection_level", "1 for the present level of protection, 0 for the others", "level"
    )
    COPIES = Description(
        "copies", "fewest copies of a slot of the newest persisted window, its own not counted"
    )
    COPIES_WANTED = Description("copies_wanted", "copies that were asked for")
    WINDOW = Description("window_steps", "W of the newest persisted window")
    PERSISTED_STEP = Description("persisted_step", "last step of the newest persisted window")
    LAG = Description("lag_steps", "steps from the end of that window until it was persisted")
    CHECKPOINT_STEP = Description("checkpoint_step", "step of the newest durable checkpoint")
    FAULTS = Description(
        "faults", "restarts in place, and launches after one that failed", kind=Kind.COUNTER
    )
    RECOVERING = Description(
        "recovering", "1 from a fault that a rank noticed until a rank trains again"
    )
    RECOVERIES = Description("recoveries", "recoveries that have ended", "verdict", Kind.COUNTER)
    RECOVERY = Description(
        "recovery_seconds", "duration of the newest recovery, by its parts", "part"
    )
    HOST_BYTES = Description("host_bytes", "host memory of snapshots and logs, of all ranks")
    MOST_HOST_BYTES = Description("host_bytes_max", "the same, of the rank with most")
    CAPTURE = Description(
        "capture_bytes_per_second", "bandwidth of copies to the host, on the slowest rank"
    )
    REPLICATION = Description(
        "replication_bytes_per_second", "bandwidth of copies to a holder, on the slowest rank"
    )


class Figure(NamedTuple):
    """A figure of a metric.

    Attributes:
        label: value of the metric's label; empty where it has none.
    """

    metric: Metric
    value: float
    label: str = ""
