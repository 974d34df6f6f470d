# SPDX-License-Identifier: Apache-2.0
"""A small record beside the files of a process: there as a whole, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megatron_moevement.policy.document import Document
from megatron_moevement.runtime.slots.mapped_file import CREATING_SUFFIX

_MAX_BYTES = 1 << 20

R = TypeVar("R")


def write_record(path: Path, record: Document) -> None:
    """Replaces a record at once."""
    creating = path.with_name(f"{path.name}{CREATING_SUFFIX}")
    creating.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(creating, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(json.dumps(record.document()))
    creating.rename(path)


def read_record(path: Path, read: Callable[[Any], R]) -> R | None:
    """Returns what a record is read as; None where nothing readable is there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return read(json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
