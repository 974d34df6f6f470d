# SPDX-License-Identifier: Apache-2.0
"""How many kernels torch keeps on a CPU.

oneDNN makes one for each shape of a product of BF16 matrices, and torch and oneDNN keep the newest
1,024 each, 0.3 and 0.4 MB large. Experts get another number of tokens in each step: the caches fill
up, and few kernels are used again.

Source: oneDNN's guide "Primitive Cache"; ideep's `lru_cache.hpp`, which torch is built with.
"""

from __future__ import annotations

from collections.abc import MutableMapping

KEPT = 64
"""The shapes of a dense model fit in."""
CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables of oneDNN and of torch."""


def limit_kept_kernels(environment: MutableMapping[str, str]) -> None:
    """Sets what is not set yet; called before torch is imported."""
    for name in CAPACITIES:
        environment.setdefault(name, str(KEPT))
