# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a synthetic run record of each step, and of their experts."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

EXPERTS, LAYERS = 16, 12


def step_fields(
    step: int, rank: int, duration_s: float, ended_s: float, random: Random
) -> Mapping[str, Any]:
    """Returns the fields of an iteration; loss and norm are the same on all ranks.

    Args:
        ended_s: when the step ended, in seconds since the epoch.
        random: draws what differs between ranks.
    """
    shared = Random(step)  # noqa: S311  (the same on all ranks)
    loss = 2.1 + 8.0 / (1 + step / 60) + shared.gauss(0, 0.03)
    captured = round(4.2e8 * (1 + 0.3 * (step % 4 == 0)) * random.uniform(0.97, 1.03))
    stall_s = 0.01 * random.random() + 0.2 * (random.random() < 0.01)
    return {
        "duration_s": duration_s,
        "ended_s": ended_s,
        "stall_s": stall_s,
        "captured_bytes": captured,
        "metadata_bytes": 2048,
        "replicated_bytes": 2 * captured,
        "log_bytes": round(6.7e7),
        "host_bytes": round(9.6e9 + 4e8 * (step % 8) + 5e7 * rank),
        "copy_s": captured / 2.1e10,
        "hash_s": captured / 3.3e10,
        "send_s": {
            str((rank + one) % 16): captured / 6e9 * random.uniform(1, 1.2) for one in (4, 8)
        },
        "log_s": 0.002,
        "await_copy_s": stall_s,
        "await_room_s": 0.0,
        "await_log_s": 0.0,
        "loss": loss,
        "learning_rate": 3e-4 * min(1.0, step / 100),
        "loss_scale": 1.0,
        "grad_norm": 0.5 + 2.0 / (1 + step / 40) + abs(shared.gauss(0, 0.08)),
        "skipped": False,
    }


def popularity_fields(step: int, random: Random) -> Mapping[str, Any]:
    """Returns what the first rank records of experts when it asks for a new order."""
    scores = [round(1e4 * random.paretovariate(2.5)) for _ in range(EXPERTS * LAYERS)]
    return {
        "ordering": "soft",
        "total": sum(scores),
        "digest": f"{step:064x}",
        "asks_for_order": True,
        "experts": EXPERTS,
        "scores": scores,
    }
