# SPDX-License-Identifier: Apache-2.0
"""What ends an interrupted generation: the abort wakes the training thread, the end cleans up."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

import torch
from nvidia_resiliency_ext.inprocess.abort import (
    Abort,
    AbortTorchDistributed,
    AbortTransformerEngine,
)
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.state import FrozenState

from megatron_moevement.runtime.coordination.generation import Interruption
from megatron_moevement.runtime.interrupts.open_sockets import (
    connected_sockets,
    shut_down_connections,
)


@dataclasses.dataclass(frozen=True)
class ShutDownConnections(Abort):  # type: ignore[misc]  # upstream is not typed
    """Wakes a training thread that waits for others; NVRx's monitor thread calls it.

    gloo has no abort: its connections are shut down, and with them those of the training's store
    and of replication. Connections from before the first generation are left alone, and those to
    the control store.

    Attributes:
        interruption: is told when an abort begins.
    """

    control_port: int
    interruption: Interruption
    _kept: frozenset[str] = dataclasses.field(default_factory=connected_sockets, init=False)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Shuts them down."""
        self.interruption.noticed_s = time.time()
        shut_down_connections(frozenset({self.control_port}), self._kept)
        return state


@dataclasses.dataclass(frozen=True)
class AbortCollectives(Abort):  # type: ignore[misc]
    """Aborts NCCL's collectives, and shuts down what waits for the training's store.

    NCCL's own connections end with its abort. The collectives are first: what else is freed waits
    for the device.

    Attributes:
        interruption: is told when an abort begins.
    """

    store_port: int
    interruption: Interruption

    def __call__(self, state: FrozenState) -> FrozenState:
        """Aborts them."""
        self.interruption.noticed_s = time.time()
        try:
            AbortTorchDistributed()(state)
            if _has_user_buffers():
                AbortTransformerEngine()(state)
        finally:
            shut_down_connections(frozenset(), frozenset(), frozenset({self.store_port}))
        return state


def _has_user_buffers() -> bool:
    """Returns whether TransformerEngine has buffers of its own for communication.

    Freeing them waits for the device, and so for its collectives; without any it would only make
    all compiled functions compile once more.
    """
    module = sys.modules.get("transformer_engine.pytorch.module.base")
    return bool(getattr(module, "_ub_communicators", None))


@dataclasses.dataclass(frozen=True)
class EndGeneration(Finalize):  # type: ignore[misc]
    """Cleans up after an interrupted generation; the training thread calls it."""

    end: Callable[[], None]
    empty_cuda_cache: bool
    """Whether unused cached GPU memory is given back."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Cleans up."""
        self.end()
        if self.empty_cuda_cache and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        return state
