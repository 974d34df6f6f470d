# SPDX-License-Identifier: Apache-2.0
"""Every stream of random numbers of a rank: seeding, capture and restoring."""

from __future__ import annotations

import base64
import hashlib
import logging
import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

logger = logging.getLogger(__name__)

TRACKER = "tracker"
_OUTSIDE_OF_ANY = "default-rng"
_STREAMS = ("device", "host")


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

    Those of another kind of device go on as the seed began them: none of its states fits.

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
    if ("device" in state) != torch.cuda.is_available():
        logger.warning(
            "the random streams of the device start again from --seed: what is loaded was computed "
            "on another kind of device"
        )
    else:
        if "device" in state:
            torch.cuda.set_rng_state(state["device"])
        tracker.set_states({name: stream.clone() for name, stream in state[TRACKER].items()})
    # An interrupt inside of `fork` leaves a name there: the next fork would overwrite the stream of
    # that name with the default one.
    tracker._current_state_name = _OUTSIDE_OF_ANY  # noqa: SLF001


def random_digest(state: dict[str, Any]) -> int:
    """Returns a number below 2^63 that stands for all streams of a random state."""
    digest = hashlib.blake2b(digest_size=8)
    _, key, *position = state["numpy"]
    digest.update(repr((state["python"], position)).encode())
    digest.update(key.tobytes())
    streams = {name: state[name] for name in _streams_in(state)} | state[TRACKER]
    for name in sorted(streams):
        digest.update(name.encode())
        digest.update(streams[name].cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def encode_random_state(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a random state as JSON holds it.

    It travels to other processes, and nothing that came from the network is unpickled. Equal states
    give equal text in every process: slots are compared by their bytes.
    """
    version, words, gauss = state["python"]
    name, key, position, has_gauss, cached = state["numpy"]
    encoded: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, key.tolist(), int(position), int(has_gauss), float(cached)],
        TRACKER: {name: _to_text(stream) for name, stream in state[TRACKER].items()},
    }
    for stream in _streams_in(state):
        encoded[stream] = _to_text(state[stream])
    return encoded


def decode_random_state(encoded: dict[str, Any]) -> dict[str, Any]:
    """Returns the random state that `encode_random_state` encoded."""
    version, words, gauss = encoded["python"]
    name, key, position, has_gauss, cached = encoded["numpy"]
    state: dict[str, Any] = {
        "python": (version, tuple(words), gauss),
        "numpy": (name, np.array(key, dtype=np.uint32), position, has_gauss, cached),
        TRACKER: {name: _to_tensor(stream) for name, stream in encoded[TRACKER].items()},
    }
    for stream in _streams_in(encoded):
        state[stream] = _to_tensor(encoded[stream])
    return state


def _streams_in(state: dict[str, Any]) -> list[str]:
    """Returns torch's own streams in a state, in one order: that of a set is the process's own."""
    return [name for name in _STREAMS if name in state]


def _to_text(stream: torch.Tensor) -> str:
    return base64.b64encode(stream.cpu().numpy().tobytes()).decode()


def _to_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
