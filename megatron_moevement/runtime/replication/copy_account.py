"""The account of copies: written by the threads that send them, read by the training thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

from megatron_moevement.policy.persistence import Acknowledgements, SlotKey
from megatron_moevement.runtime.news import News

logger = logging.getLogger(__name__)


class CopyAccount:
    """Which copies are acknowledged, who is silent, and which slots are damaged at home."""

    def __init__(self) -> None:
        """Begins with nothing on its way."""
        self._lock = threading.Lock()
        self._news = News()
        self._acknowledgements = Acknowledgements()
        self._silent: dict[int, str] = {}
        self._damaged: frozenset[SlotKey] = frozenset()

    @property
    def acknowledgements(self) -> Acknowledgements:
        """What is known of the copies of this process's own slots."""
        with self._lock:
            return self._acknowledgements

    @property
    def silent(self) -> Mapping[int, str]:
        """The processes that are sent nothing any more, each with the reason."""
        with self._lock:
            return dict(self._silent)

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
            self._changed()

    def note_silent(self, process: int, reason: str) -> None:
        """Notes that a process is not relied on any more."""
        logger.warning("replication: process %d is silent: %s", process, reason)
        with self._lock:
            self._silent[process] = reason
            self._changed()

    def note_damaged(self, key: SlotKey) -> None:
        """Notes that a slot is damaged in this process's own memory."""
        logger.error("replication: slot %d of %s is damaged in this memory", key.slot, key.owner)
        with self._lock:
            self._damaged |= {key}
            self._changed()

    def forgive(self, process: int) -> None:
        """Forgets that a process was silent."""
        with self._lock:
            self._silent.pop(process, None)

    def await_change(self, timeout: timedelta) -> bool:
        """Waits until something is noted; returns whether anything was since the last call."""
        return self._news.wait(timeout)

    def _changed(self) -> None:
        self._news.tell()
