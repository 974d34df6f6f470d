# SPDX-License-Identifier: Apache-2.0
"""The machine: room for files, memory and locked memory, as the system gives them to a process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from megatron_moevement.errors import UserError
from megatron_moevement.policy.preflight.obstacles import Machine
from megatron_moevement.runtime.security.ownership import check_folder
from megatron_moevement.runtime.slots.available_memory import available_memory_bytes
from megatron_moevement.runtime.slots.mapped_file import free_bytes, is_in_memory
from megatron_moevement.runtime.stores.store import folder_bytes, process_folders

_STATUS = Path("/proc/self/status")
_CAN_LOCK_ANY = 1 << 14
"""CAP_IPC_LOCK among the capabilities: no limit of locked memory holds."""


def look_at_machine(root: Path, run_id: str) -> Machine:
    """Returns what this machine has for a run.

    Args:
        root: the store directory; it need not be there.
        run_id: names the run's folder in it: files that are there are used again.

    Raises:
        UserError: a job could not make its files there.
    """
    existing = existing_folder(root)
    kept_bytes = sum(map(folder_bytes, process_folders(root / run_id).values()))
    in_memory = is_in_memory(existing)
    return Machine(
        store_dir=str(root),
        file_bytes=free_bytes(existing) + kept_bytes,
        memory_bytes=available_memory_bytes() + (kept_bytes if in_memory else 0),
        lockable_bytes=lockable_bytes(),
        files_in_memory=in_memory,
    )


def existing_folder(root: Path) -> Path:
    """Returns the store directory, or the nearest folder above it, in which a job would make it.

    Raises:
        UserError: it could not.
    """
    try:
        found = next(one for one in (root, *root.parents) if one.exists())
        if found == root:
            check_folder(root, "--moevement-store-dir")
    except OSError as error:
        raise UserError(
            f"can't read {root}: {error.strerror or error}; give another --moevement-store-dir"
        ) from error
    if not (found.is_dir() and os.access(found, os.W_OK | os.X_OK)):
        raise UserError(
            f"can't make {root}: {found} is no folder in which this user may write; give another "
            "--moevement-store-dir"
        )
    return found


def lockable_bytes(status: Path = _STATUS) -> int | None:
    """Returns how much memory this process may lock; None without a limit.

    Args:
        status: where the kernel lists the capabilities of this process.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lines = status.read_text(encoding="ascii").splitlines()
    (capabilities,) = (line.split()[1] for line in lines if line.startswith("CapEff:"))
    if limit == resource.RLIM_INFINITY or int(capabilities, 16) & _CAN_LOCK_ANY:
        return None
    return limit
