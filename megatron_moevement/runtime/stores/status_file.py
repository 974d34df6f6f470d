# SPDX-License-Identifier: Apache-2.0
"""How protected a run is, beside the files of a process: for who asks from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moevement.runtime.slots.mapped_file import CREATING_SUFFIX

STATUS_NAME = "status.json"
_MAX_BYTES = 1 << 16


def write_status(folder: Path, document: Mapping[str, Any]) -> None:
    """Replaces what the folder of a process says, at once; nothing happens where it can't."""
    creating = folder / f"{STATUS_NAME}{CREATING_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(creating, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file)
        creating.rename(folder / STATUS_NAME)
    except OSError:
        return  # a full memory is reported where it matters


def read_status(folder: Path) -> dict[str, Any] | None:
    """Returns what the folder of a process says; None where it says nothing readable."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(folder / STATUS_NAME, flags), "rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
