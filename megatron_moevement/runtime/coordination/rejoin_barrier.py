# SPDX-License-Identifier: Apache-2.0
"""A meeting of all ranks for which some wait long: those that serve logs while others replay.

It is no collective. A rank that waits in one looks hung to a watchdog, may exceed the time limit of
its group, and can't be interrupted; here it waits for the job's store, in slices.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from megatron_moevement.errors import MoEvementError

_SLICE = timedelta(seconds=0.25)
"""An interrupt arrives between two. With thousands of ranks, more of them would load the store."""


class RejoinBarrierError(MoEvementError, RuntimeError):
    """A rank has not come, and nobody made progress for too long."""


class RejoinBarrier:
    """One meeting; the training thread of every rank takes part, once."""

    def __init__(self, name: str, patience: timedelta) -> None:
        """Names the meeting; nothing else in the job's store may have the name.

        Args:
            name: the same on all ranks.
            patience: how long nobody may arrive or make progress.
        """
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  (the only way)
        self._name = name
        self._patience_s = patience.total_seconds()

    def note_progress(self) -> None:
        """Tells those who wait that this rank is on its way."""
        self._store.add(f"{self._name}/progress", 1)

    def wait(self) -> None:
        """Arrives, and waits until all ranks have; an asynchronous exception ends it.

        Raises:
            RejoinBarrierError: nobody made progress for too long.
        """
        self.note_progress()
        everybody = f"{self._name}/everybody"
        if self._store.add(f"{self._name}/arrived", 1) == dist.get_world_size():
            self._store.set(everybody, "")
        seen, since_s = -1, time.monotonic()
        while not self._come(everybody):
            progress = self._store.add(f"{self._name}/progress", 0)
            if progress != seen:
                seen, since_s = progress, time.monotonic()
            elif time.monotonic() - since_s > self._patience_s:
                raise RejoinBarrierError(
                    f"after a recovery a rank did not come back for {self._patience_s:.0f} s"
                )

    def _come(self, everybody: str) -> bool:
        """Waits for all ranks, one slice; returns whether they have come."""
        try:
            self._store.wait([everybody], _SLICE)
        except dist.DistStoreError:
            return False
        return True
