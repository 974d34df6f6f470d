# SPDX-License-Identifier: Apache-2.0
"""What events of iterations cost: time of the training thread, and bytes of a process.

.venv/bin/python benchmarks/event_cost.py
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_moevement.runtime.observation.events import EventLog, EventName, Recording

STEPS = 5000
PAUSE_EVERY = 100


def fields(step: int, rank: int) -> dict[str, Any]:
    """Returns the fields of a step of a job with two copies, with as many digits as they have."""
    began_s = 1795735000.123456 + step
    shared = {
        "loss": 2.3456789012345 + step * 1e-6,
        "learning_rate": 0.000123,
        "loss_scale": 1.0,
        "grad_norm": 0.51234567891,
        "skipped": 0,
    }
    return {
        "steps": 1,
        "duration_s": 0.98765432101 + step * 1e-9,
        "began_s": began_s,
        "ended_s": began_s + 0.98765432,
        "stall_s": 0.00123456,
        "captured_bytes": 123456789,
        "metadata_bytes": 4321,
        "replicated_bytes": 246913578,
        "log_bytes": 12345678,
        "host_bytes": 987654321,
        "copy_s": 0.0123456789,
        "hash_s": 0.0123456789,
        "send_s": {1: 0.123456789, 2: 0.12345678},
        "log_s": 0.0123456,
        "await_copy_s": 0.0,
        "await_room_s": 0.0,
        "await_log_s": 0.0,
        **(shared if rank == 0 else {}),
    }


def measure(rank: int, recording: Recording | None) -> None:
    """Prints what one recording costs."""
    took_s = []
    with tempfile.TemporaryDirectory() as folder:
        with EventLog(folder, rank, 0, recording) as events:
            for step in range(1, STEPS + 1):
                found = fields(step, rank)
                started_s = time.perf_counter()
                events.emit(EventName.ITERATION, step, **found)
                took_s.append(time.perf_counter() - started_s)
                if step % PAUSE_EVERY == 0:
                    time.sleep(0.002)  # training goes on
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    how = "at once" if recording is None else f"interval {recording.interval}"
    median_us = statistics.median(took_s) * 1e6
    print(f"rank {rank}, {how}: {size / STEPS:.1f} bytes and {median_us:.1f} us a step (median)")


def main() -> None:
    """Compares recordings, of rank 0 and of another rank."""
    for rank in (0, 1):
        for recording in (None, Recording(1), Recording(10), Recording(100)):
            measure(rank, recording)


if __name__ == "__main__":
    main()
