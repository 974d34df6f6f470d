# SPDX-License-Identifier: Apache-2.0
"""The account of copies: written by the threads that send them, read by the training thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from megatron_moevement.policy.copies.peer_trouble import Trouble
from megatron_moevement.policy.copies.persistence import Acknowledgements, SlotKey
from megatron_moevement.policy.watching.measurements import HISTORY, Work
from megatron_moevement.runtime.interrupts.interrupt_safe_event import InterruptSafeEvent

logger = logging.getLogger(__name__)


class CopyAccount:
    """Which copies are acknowledged, who is silent, and which slots are damaged at home."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news = InterruptSafeEvent()
        self._acknowledgements = Acknowledgements()
        self._silent: dict[int, str] = {}
        self._troubles: dict[int, Trouble] = {}
        self._damaged: frozenset[SlotKey] = frozenset()
        self._sent: defaultdict[int, deque[Work]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._spent_s: defaultdict[int, float] = defaultdict(float)

    @property
    def acknowledgements(self) -> Acknowledgements:
        """What is known of the copies of this process's own slots."""
        with self._lock:
            return self._acknowledgements

    @property
    def silent(self) -> Mapping[int, str]:
        """The processes that are sent nothing until they are tried again, each with the reason."""
        with self._lock:
            return dict(self._silent)

    @property
    def troubles(self) -> Mapping[int, Trouble]:
        """The processes that have confirmed no copy since a transfer to them failed."""
        with self._lock:
            return dict(self._troubles)

    @property
    def damaged(self) -> frozenset[SlotKey]:
        """The slots whose bytes in this process's memory are not those that were captured."""
        with self._lock:
            return self._damaged

    def update(self, change: Callable[[Acknowledgements], Acknowledgements]) -> None:
        """Replaces the acknowledgements by what `change` makes of them, in one go."""
        with self._lock:
            self._acknowledgements = change(self._acknowledgements)

    def note_acknowledged(self, key: SlotKey, process: int) -> None:
        """Notes that a process has checked and keeps a copy."""
        with self._lock:
            self._acknowledgements = self._acknowledgements.acknowledged(key, process)
            trouble = self._troubles.pop(process, None)
            self._news.tell()
        if trouble is not None:
            logger.warning(
                "replication: process %d keeps copies again, after %d failed transfers",
                process,
                trouble.failures,
            )

    def note_sent(self, process: int, work: Work) -> None:
        """Notes how long it took to send a copy to a process and to have it acknowledged."""
        with self._lock:
            self._sent[process].append(work)
            self._spent_s[process] += work.spent_s

    def sent_to(self, process: int) -> Sequence[Work]:
        """Returns the newest copies that a process has acknowledged."""
        with self._lock:
            return tuple(self._sent.get(process, ()))

    @property
    def spent_s(self) -> Mapping[int, float]:
        """For each process the time that its copies took until now."""
        with self._lock:
            return dict(self._spent_s)

    def note_silent(self, process: int, reason: str, since_s: float) -> None:
        """Notes that a transfer to a process has failed.

        Args:
            since_s: when something moved last, on the monotonic clock.
        """
        with self._lock:
            former = self._troubles.get(process)
            trouble = Trouble.after(former, since_s, time.monotonic(), reason)
            self._troubles[process] = trouble
            self._silent[process] = reason
            self._news.tell()
        if former is None or former.reason != reason:
            logger.warning("replication: a transfer to process %d has failed: %s", process, reason)

    def note_damaged(self, key: SlotKey) -> None:
        """Notes that a slot is damaged in this process's own memory.

        The buffer of a slot that is accounted for no more may hold another one.
        """
        with self._lock:
            if key not in self._acknowledgements.owing:
                return
            self._damaged |= {key}
            self._news.tell()
        logger.error("replication: slot %d of %s is damaged in this memory", key.slot, key.owner)

    def forgive(self, process: int) -> None:
        """Lets a process be sent copies again; that transfers to it failed is not forgotten."""
        with self._lock:
            self._silent.pop(process, None)

    def await_change(self, timeout: timedelta) -> bool:
        """Waits until something is noted; returns whether anything was since the last call."""
        return self._news.wait(timeout)
