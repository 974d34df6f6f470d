# SPDX-License-Identifier: Apache-2.0
"""The common state of a checkpoint, `common.pt`: what is no part of a tensor.

Whoever may not import Megatron-Core yet reads it, too. Nothing of a checkpoint is executed: of the
classes in it that torch does not know, the values are kept and the classes are not looked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMON_KEY = "moevement"
"""The key of our own part; the others are Megatron-LM's."""
COMMON_FILE = "common.pt"
OWN_FORMAT = 2
"""Format of our own part: 2 lies beside Megatron-LM's `args` and `iteration`; 1 had no number."""


@dataclasses.dataclass(frozen=True)
class UnshardedState:
    """What a checkpoint says of itself."""

    entries: Mapping[str, Any]

    @property
    def own(self) -> dict[str, Any] | None:
        """Our own part; None: Megatron-LM wrote the checkpoint."""
        own = self.entries.get(COMMON_KEY)
        return None if own is None else dict(own)

    @property
    def args(self) -> dict[str, Any]:
        """Megatron-LM's arguments by name, none where it kept none."""
        return dict(getattr(self.entries.get("args"), "__dict__", {}))

    @property
    def iteration(self) -> int:
        """The step that Megatron-LM saved."""
        return int(self.entries.get("iteration") or 0)


def read_unsharded_state(checkpoint: Path) -> UnshardedState | None:
    """Returns the common state of a checkpoint; None where it can't be read."""
    import torch  # noqa: PLC0415  (command lines that need no checkpoint are parsed without)
    from torch.serialization import (  # noqa: PLC0415
        get_unsafe_globals_in_checkpoint,
        safe_globals,
    )

    file = checkpoint / COMMON_FILE
    try:
        unknown = get_unsafe_globals_in_checkpoint(file)
        with safe_globals([(_kept(name), name) for name in unknown]):
            entries = torch.load(file, map_location="cpu", weights_only=True)
        return UnshardedState(dict(entries))
    except Exception:  # noqa: BLE001  (whatever torch makes of damaged files)
        return None


def _kept(name: str) -> type[Any]:
    """Returns a class that keeps what an object of another one was made of, and does nothing."""

    class Kept:
        def __init__(self, *values: Any) -> None:
            self.values = values

        def __repr__(self) -> str:
            return f"{name}{vars(self)}"

    return Kept
