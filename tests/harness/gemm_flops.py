# SPDX-License-Identifier: Apache-2.0
"""Counts the floating-point operations of matrix products, grouped ones included."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def gemm_flops() -> FlopCounterMode:
    """Returns a context that counts; `get_total_flops` says how many it saw."""
    grouped_mm = torch.ops.aten._grouped_mm  # noqa: SLF001  (as the dispatcher names it)
    return FlopCounterMode(display=False, custom_mapping={grouped_mm: _grouped_mm_flops})


def _grouped_mm_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Counts `[M, K] x [K, N]` by groups of rows (then b is `[E, K, N]`) or of K."""
    return int(2 * a[0] * a[1] * b[-1])
