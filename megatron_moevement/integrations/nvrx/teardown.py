"""What ends an interrupted generation: the abort wakes the training thread, the end cleans up."""

from __future__ import annotations

import dataclasses
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


class ShutDownConnections(Abort):  # type: ignore[misc]  # upstream is not typed
    """Wakes a training thread that waits for others; NVRx's monitor thread calls it.

    gloo has no abort: its connections are shut down, and with them those of the training's store
    and of replication. Connections from before the first generation are left alone, and those to
    the control store.
    """

    def __init__(self, control_port: int, interruption: Interruption) -> None:
        """Remembers what is connected now.

        Args:
            interruption: is told when an abort begins.
        """
        self._kept_ports = frozenset({control_port})
        self._kept = connected_sockets()
        self._interruption = interruption

    def __call__(self, state: FrozenState) -> FrozenState:
        """Shuts them down."""
        self._interruption.noticed_s = time.time()
        shut_down_connections(self._kept_ports, self._kept)
        return state


class AbortCollectives(Abort):  # type: ignore[misc]
    """Aborts NCCL's collectives, and shuts down what waits for the training's store.

    NCCL's own connections end with its abort.
    """

    def __init__(self, store_port: int, interruption: Interruption) -> None:
        """Names the store.

        Args:
            interruption: is told when an abort begins.
        """
        self._store_ports = frozenset({store_port})
        self._interruption = interruption
        self._transformer_engine = AbortTransformerEngine()
        self._collectives = AbortTorchDistributed()

    def __call__(self, state: FrozenState) -> FrozenState:
        """Aborts them."""
        self._interruption.noticed_s = time.time()
        self._transformer_engine(state)
        self._collectives(state)
        shut_down_connections(frozenset(), frozenset(), self._store_ports)
        return state


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
