# SPDX-License-Identifier: Apache-2.0
"""Memory in use, as scalars."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

_CUDA_STATISTICS = {
    "mem-reserved-bytes": "reserved_bytes.all.current",
    "mem-allocated-bytes": "allocated_bytes.all.current",
    "mem-max-allocated-bytes": "allocated_bytes.all.peak",
    "mem-allocated-count": "allocation.all.current",
}


def memory_scalars(device: torch.device) -> dict[str, float]:
    """Returns what this process uses: Megatron's names on a GPU, resident memory on the host."""
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        return {name: statistics[key] for name, key in _CUDA_STATISTICS.items()}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    # The kernel may count the peak later than the present.
    peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"mem-resident-bytes": resident, "mem-max-resident-bytes": peak}
