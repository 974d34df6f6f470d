"""The store of in-process restart: hosted by the launcher, so that any rank may die.

NVRx's own store is hosted by rank 0, whose death would end the job.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import PrefixStore, StoreMixin

from megatron_moevement.settings.launch import Address

_PATIENCE = timedelta(seconds=10)
_SLICE = timedelta(seconds=0.25)


class ControlStore(dist.TCPStore, StoreMixin):  # type: ignore[misc, name-defined]
    """A connection to the store that the launcher hosts; no rank is critical to it."""

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        """Connects.

        Args:
            host: where it is served.
            port: where it is served.
            timeout: of every question to it.
        """
        super().__init__(host, port, None, False, timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for keys, in slices: Ctrl-C arrives only between two instructions of Python.

        Raises:
            DistStoreError: the time is over.
        """
        deadline_s = time.monotonic() + (timeout or self.timeout).total_seconds()
        while True:
            left = timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
            try:
                super().wait(keys, min(left, _SLICE))
            except dist.DistStoreError:
                if time.monotonic() >= deadline_s:
                    raise
            else:
                return

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """The ranks that must leave last: none."""
        return ()


def mend_initial_ranks() -> None:
    """Makes NVRx read initial ranks as the numbers that it takes them for.

    `StoreMixin.get_initial_ranks` (0.4.1 to 0.7) returns bytes. After the death of a node `b'2'` is
    written to the termination barrier, where the next reader takes it for a number and fails.
    """
    upstream = StoreMixin.get_initial_ranks
    if getattr(upstream, "is_mended", False):
        return

    def get_initial_ranks(self: StoreMixin, ranks: Iterable[int]) -> list[int]:
        return [int(rank) for rank in upstream(self, ranks)]

    get_initial_ranks.is_mended = True  # type: ignore[attr-defined]
    StoreMixin.get_initial_ranks = get_initial_ranks


def request_restart(control: Address, generation: int) -> None:
    """Has all processes of a job begin another generation, wherever they are; anybody may call it.

    Args:
        control: address of the control store.
        generation: the present one; nothing happens when it is over already.
    """
    store = PrefixStore(generation, ControlStore(*control, _PATIENCE))
    store.record_interrupted([InterruptionRecord(0, Interruption.EXCEPTION)])
