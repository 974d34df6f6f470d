# SPDX-License-Identifier: Apache-2.0
"""The store of in-process restart: hosted by the launcher, so that any rank may die.

NVRx's own store is hosted by rank 0, whose death would end the job.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import monitor_process, wrap
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import PrefixStore

from megatron_moevement.integrations.nvrx.sealed_store import SealedStore
from megatron_moevement.policy.watching.short_lists import slice_s
from megatron_moevement.runtime.coordination.attendance import left_by
from megatron_moevement.runtime.coordination.roll_call import RollCall, newest_round, prefix_of
from megatron_moevement.runtime.interrupts.open_sockets import bound_silence
from megatron_moevement.runtime.rebindings import rebind
from megatron_moevement.runtime.security.seal import Seal
from megatron_moevement.settings.launch import Address
from megatron_moevement.settings.secret import Secret

_PATIENCE = timedelta(seconds=10)
_SLICE_S = 0.25
_NOTICES = "moevement_notices_"


class ControlStore(SealedStore, dist.PrefixStore):  # type: ignore[misc, name-defined]
    """A connection to the store that the launcher hosts; no rank is critical to it."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout: timedelta,
        secret: Secret,
        attempt: str = "0",
        *,
        roll: RollCall | None = None,
    ) -> None:
        """Connects.

        Args:
            timeout: of every question to it, and of the silence of its machine.
            secret: of the job; what nobody wrote who has it does not count.
            attempt: name of the start of the job, under which its keys lie.
            roll: the processes that take part; None: those of the newest round.
        """
        self.connection = dist.TCPStore(host, port, None, False, timeout)  # type: ignore[attr-defined]
        self._roll = roll
        self._slice_s = slice_s(_SLICE_S, 0 if roll is None else roll.processes)
        number = newest_round(self.connection, attempt) if roll is None else roll.number
        prefix = prefix_of(attempt, number)
        super().__init__(prefix, self.connection)
        self.seal = Seal(secret.derive("control store", prefix))
        self._begin(self.seal, "")
        # A process that ends closes its connections; a machine that is gone doesn't.
        bound_silence(port, timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for keys, in slices: Ctrl-C arrives only between two instructions of Python.

        Raises:
            DistStoreError: the time is over.
            LostAtStartError: a process is lost that nobody watched.
        """
        deadline_s = time.monotonic() + (timeout or self.timeout).total_seconds()
        while True:
            self.check_start()
            try:
                super().wait(keys, left_by(deadline_s, self._slice_s))
            except dist.DistStoreError:
                if time.monotonic() >= deadline_s:
                    raise
            else:
                return

    def check_start(self) -> None:
        """Checks that no process was lost before it was watched.

        Raises:
            LostAtStartError: one was.
        """
        if self._roll is not None:
            self._roll.check(self.connection)

    def note_watched(self) -> None:
        """Notes that this process, a monitor, watches the one that it belongs to."""
        if self._roll is not None:
            self._roll.note_watched(self.connection)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """The ranks that must leave last: none."""
        return ()


def _unless_lost(
    ask: Callable[..., Any], nothing: Callable[[], Any] = lambda: None
) -> Callable[..., Any]:
    """Returns a method that asks the store, and returns nothing where the connection is lost.

    The end of a time limit is another error, which is raised.
    """

    @functools.wraps(ask)
    def asked(*args: Any, **kwargs: Any) -> Any:
        try:
            return ask(*args, **kwargs)
        except dist.DistNetworkError:
            return nothing()

    return asked


class GenerationStore(SealedStore, PrefixStore):  # type: ignore[misc]
    """The keys of one generation; that the control store is lost is a fault of all processes.

    NVRx's monitors (0.4.1) die of the lost connection, each by itself: training goes on without
    them, and the training thread waits for ever for their interrupt when it ends. Here each process
    is told that it is interrupted, and needs nobody to write that down. What processes have to
    agree on fails: barriers, and with them the end of the generation.

    A process that leaves the job, as by Ctrl-C, waits for nobody: one that hangs would keep it.
    """

    def __init__(self, iteration: int, store: Any) -> None:
        super().__init__(iteration, store)
        self._begin(store.seal, str(iteration))
        self._terminated: set[int] = set()
        self._control: ControlStore = store
        store.note_watched()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for keys.

        Raises:
            DistStoreError: the time is over.
            LostAtStartError: a process is lost that nobody watched, and nobody will speak for it.
        """
        self._control.check_start()
        super().wait(keys, timeout or self.timeout)

    wait_for_interrupted = _unless_lost(SealedStore.wait_for_interrupted)
    record_interrupted = _unless_lost(SealedStore.record_interrupted)
    lock_interruption_records = _unless_lost(SealedStore.lock_interruption_records)
    is_rank_at_reentrant_barrier = _unless_lost(SealedStore.is_rank_at_reentrant_barrier, bool)
    """Returns whether a process waits for the others, which excuses it from signs of life."""

    def is_interrupted(self) -> bool:
        """Returns whether a restart of the generation was asked for; that is noted before an abort.

        Raises:
            DistNetworkError: the control store is lost.
        """
        return bool(self.check([self.ANY_RANK_INTERRUPTED]))

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Says whose processes are lost, or leave."""
        self._terminated.update(ranks)
        _unless_lost(super().record_terminated_ranks)(ranks)

    def iteration_barrier(
        self,
        ranks: Iterable[int],
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Waits until all processes have left the generation.

        NVRx's monitors, which give slices, wait for those of whom they said that they are lost.

        Raises:
            BarrierTimeout: the time is over.
            DistNetworkError: the store is lost.
        """
        is_leaving = timeout_chunk is None and self._terminated.issuperset(ranks)
        super().iteration_barrier(
            ranks=ranks,
            rendezvous_count=rendezvous_count,
            timeout=timedelta(0) if is_leaving else timeout,
            # As in `ControlStore.wait`.
            timeout_chunk=timeout_chunk or timedelta(seconds=slice_s(_SLICE_S, rendezvous_count)),
        )

    @_unless_lost
    def add_notice(self, topic: str, document: Any) -> None:
        """Adds a document to those of a topic."""
        self.append(*self._line(f"{_NOTICES}{topic}", document))

    @functools.partial(_unless_lost, nothing=list)
    def notices(self, topic: str) -> list[Any]:
        """Returns the documents of a topic, the oldest first: none, where the store is lost."""
        return list(self._lines(f"{_NOTICES}{topic}").values())


def mend_generation_stores() -> None:
    """Makes NVRx use sealed stores whose loss is a fault, in this process and its monitor."""
    for module in (wrap, monitor_process):
        rebind(f"{module.__name__}:PrefixStore", GenerationStore)


def request_restart(control: Address, generation: int, secret: Secret) -> None:
    """Has all processes of a job begin another generation, wherever they are.

    Args:
        generation: the present one; nothing happens when it is over already.
    """
    store = GenerationStore(generation, ControlStore(*control, _PATIENCE, secret))
    store.record_interrupted([InterruptionRecord(0, Interruption.EXCEPTION)])
