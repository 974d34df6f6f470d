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
        if isinstance(part, DistributedOptimizer) and _is_empty(part):
            part.sharded_state_dict = _nothing
            part.load_state_dict = _load_nothing


def _is_empty(part: MegatronOptimizer) -> bool:
    if part.is_stub_optimizer:
        return False  # upstream knows these
    return not any(group["params"] for group in part.optimizer.param_groups)


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


def _load_nothing(state: dict[str, Any]) -> None:
    del state
