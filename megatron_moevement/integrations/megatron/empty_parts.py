# SPDX-License-Identifier: Apache-2.0
"""Parts of the optimizer without parameters: upstream can neither save nor load them.

Experts with a data-parallel group of their own have a part. On a stage without MoE layers it is
empty, and upstream's distributed optimizer asserts that its parameters count one number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def mend_empty_parts(parts: Iterable[MegatronOptimizer]) -> None:
    """Makes parts without parameters save nothing and load nothing."""
    for part in parts:
        # Upstream can save and load a stub.
        is_empty = not part.is_stub_optimizer and not part.get_parameters()
        if isinstance(part, DistributedOptimizer) and is_empty:
            part.sharded_state_dict = _nothing
            part.load_state_dict = _load_nothing


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


def _load_nothing(state: dict[str, Any]) -> None:
    del state
