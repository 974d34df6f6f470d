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


def memory_line(
    rank: int, iteration: int, device: torch.device, *, of_all_processes: bool = False
) -> str:
    """Returns the line of one rank's memory in MiB, as Megatron-LM has it.

    Args:
        of_all_processes: whether it has what all processes use of the GPU, too.

    Source: `report_memory` of megatron/training/utils.py.
    """
    if device.type == "cuda":
        found = {
            "allocated": torch.cuda.memory_allocated(device),
            "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max reserved": torch.cuda.max_memory_reserved(device),
        }
        used = _used_by_all(device) if of_all_processes else None
        if used is not None:
            found["total device memory used"] = used
    else:
        scalars = memory_scalars(device)
        found = {
            "resident": int(scalars["mem-resident-bytes"]),
            "max resident": int(scalars["mem-max-resident-bytes"]),
        }
    texts = [f"{name}: {size_bytes / (1 << 20):.2f}" for name, size_bytes in found.items()]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | " + " | ".join(texts)


def _used_by_all(device: torch.device) -> int | None:
    """Returns what all processes use of a GPU; None where the driver's library has no answer."""
    try:
        return torch.cuda.device_memory_used(device)
    except Exception:  # noqa: BLE001  (none of what NVML may raise is worth a job)
        return None
