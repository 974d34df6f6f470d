# SPDX-License-Identifier: Apache-2.0
"""How long a thread of training waits for a core that a thread beside training has.

    .venv/bin/python benchmarks/wake_ups.py --rounds 5

A process computes without end as a thread beside training does, once with its lower priority alone
and once with the longer slices, too, in turns. On the same core a thread sleeps a millisecond and
computes half of one, like a rank that waits for messages. A row has how much longer than a
millisecond it slept.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable

import numpy as np

from megatron_moevement.runtime.priority import BACKGROUND_NICE, lower_priority

_SLEEP_S, _WORK_S = 0.001, 0.0005
QUANTILES = {"median": 50.0, "98 %": 98.0, "99 %": 99.0, "longest": 100.0}


def main() -> None:
    """Prints a table; its figures are in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turns")
    parser.add_argument("--wake-ups", type=int, default=2000, help="of a round each")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    kinds = {"priority alone": _lower_priority_alone, "longer slices": lower_priority}
    late: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, lower in kinds.items():
            late[name] += beside(lower, options.wake_ups)
    columns = [*QUANTILES, "mean"]
    print("| beside a thread with | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, found in late.items():
        figures = [*np.percentile(found, list(QUANTILES.values())), np.mean(found)]
        print(f"| {name} | " + " | ".join(f"{1e6 * figure:.0f}" for figure in figures) + " |")


def _lower_priority_alone() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, BACKGROUND_NICE)


def beside(lower: Callable[[], None], count: int) -> list[float]:
    """Returns how late a thread wakes up beside a process that computes, in seconds."""
    process = os.fork()
    if not process:
        lower()
        while True:
            pass
    try:
        return [_lateness_s() for _ in range(count)]
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _lateness_s() -> float:
    began_s = time.perf_counter()
    time.sleep(_SLEEP_S)
    woken_s = time.perf_counter()
    while time.perf_counter() - woken_s < _WORK_S:
        pass
    return woken_s - began_s - _SLEEP_S


if __name__ == "__main__":
    main()
