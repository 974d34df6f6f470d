# SPDX-License-Identifier: Apache-2.0
"""The machine and its versions, as a report of figures has to name them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from megatron_moevement.backends.backend import choose, load
from tests.harness.gpu_check.results import Found, Scale

_GIB = 1 << 30


def name_of_machine() -> str:
    """Returns what computes, in a line."""
    parts = load(choose(None)).parts()
    return ", ".join(parts[name] for name in ("GPU", "processor") if name in parts) + (
        f", torch {torch.__version__}"
    )


def describe(scale: Scale, folder: Path) -> Found:
    """Returns versions and sizes."""
    del scale, folder
    figures: dict[str, Any] = {
        **load(choose(None)).parts(),
        "python": platform.python_version(),
        "megatron-core": importlib.metadata.version("megatron-core"),
        "nvidia-resiliency-ext": importlib.metadata.version("nvidia-resiliency-ext"),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB,
        "shared memory GiB": shutil.disk_usage("/dev/shm").total / _GIB,  # noqa: S108
        "locked memory": _locked_memory(),
        "commit": _told_by("git", "rev-parse", "--short", "HEAD"),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        figures |= {
            "GPUs": torch.cuda.device_count(),
            "GPU memory GiB": properties.total_memory / _GIB,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _told_by(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
            ),
        }
    return Found({name: value for name, value in figures.items() if value is not None})


def _locked_memory() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _GIB:.3g} GiB"


def _told_by(*command: str) -> str | None:
    """Returns what a program prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
