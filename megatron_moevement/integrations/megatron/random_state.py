"""Every stream of random numbers of a rank: seeding, capture and restoring."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

TRACKER = "tracker"


def seed_everything(seed: int, pipeline_rank: int) -> None:
    """Seeds all streams; the same seed on another pipeline stage gives other weights.

    Source: `_set_random_seed` of megatron/training/initialize.py.
    """
    seed += 100 * pipeline_rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Returns a copy of all streams: Python, NumPy, host, device, and Megatron's named streams."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "host": torch.get_rng_state(),
        TRACKER: {name: stream.clone() for name, stream in tracker.get_states().items()},
    }
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Puts all streams back to what `random_state` returned.

    Raises:
        KeyError: the state comes from a rank with other streams; none has changed.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    unequal = tracker.get_states().keys() ^ state[TRACKER].keys()
    if unequal:
        raise KeyError(f"random streams differ: {', '.join(sorted(unequal))}")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["host"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"])
    tracker.set_states({name: stream.clone() for name, stream in state[TRACKER].items()})
