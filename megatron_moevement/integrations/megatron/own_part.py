"""Our part of a checkpoint's common state, for whoever may not import Megatron-Core yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON_KEY = "moevement"
"""Its key."""


def read_early(checkpoint: Path) -> dict[str, Any] | None:
    """Returns it; None where it can't be read."""
    import torch  # noqa: PLC0415  (command lines that need no checkpoint are parsed without)

    try:
        common = torch.load(checkpoint / "common.pt", map_location="cpu")
        return dict(common[COMMON_KEY])
    except Exception:  # noqa: BLE001  (whatever torch makes of damaged files)
        return None
