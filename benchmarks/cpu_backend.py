# SPDX-License-Identifier: Apache-2.0
"""What the CPU backend costs per operation: the same operations before and after it is installed.

.venv/bin/python benchmarks/cpu_backend.py
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable

import torch

from megatron_moevement.backends import cpu

torch.set_num_threads(1)
X = torch.randn(32, 32)
OPERATIONS: dict[str, Callable[[], object]] = {
    "torch.zeros(8, device='cpu')": lambda: torch.zeros(8, device="cpu"),
    "x.to('cpu')": lambda: X.to("cpu"),
    "x.type()": X.type,
    "x @ x": lambda: X @ X,
}
CALLS, ROUNDS = 20_000, 15


def measure() -> dict[str, list[float]]:
    """Returns nanoseconds per call of each operation, for several rounds."""
    return {
        name: [timeit.timeit(call, number=CALLS) / CALLS * 1e9 for _ in range(ROUNDS)]
        for name, call in OPERATIONS.items()
    }


def main() -> None:
    plain, installed = [], []
    for _ in range(3):  # take turns: the machine may be busy with other things
        plain.append(measure())
        uninstall = cpu.install()
        installed.append(measure())
        uninstall()
    for name in OPERATIONS:
        before, after = (
            statistics.median([ns for round_ in rounds for ns in round_[name]])
            for rounds in (plain, installed)
        )
        print(f"{name:30} {before:8.0f} ns, with the backend {after:8.0f} ns: {after / before:.3f}")


if __name__ == "__main__":
    main()
