# SPDX-License-Identifier: Apache-2.0
"""Where the memory of a run lies, by the flags."""

from __future__ import annotations

from pathlib import Path

from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.runtime.stores.store import default_store_dir
from megatron_moevement.settings.fault_tolerance import FaultTolerance

_RUN_ID_DIGITS = 16


def store_root(settings: FaultTolerance) -> Path:
    """Returns the store directory."""
    return Path(settings.moevement_store_dir or default_store_dir())


def store_place(settings: FaultTolerance, identity: RunIdentity) -> tuple[Path, str]:
    """Returns the store directory, and the name under which a run has its folder in it."""
    return store_root(settings), settings.moevement_run_id or identity.digest[:_RUN_ID_DIGITS]
