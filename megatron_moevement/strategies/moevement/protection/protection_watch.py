# SPDX-License-Identifier: Apache-2.0
"""The level of protection of a job: found out at every window edge, reported when it changes."""

from __future__ import annotations

import time

import torch.distributed as dist

from megatron_moevement.policy.copies.protection_level import (
    JobShape,
    Protection,
    ProtectionLevel,
    protection_of,
    tied_ends,
)
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.observation.notices import Notices
from megatron_moevement.runtime.stores.origin_file import forget_origin
from megatron_moevement.runtime.stores.status_file import write_status
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory


class ProtectionWatch:
    """Of one generation; the training thread of every rank calls it."""

    def __init__(
        self,
        shape: JobShape,
        events: Events,
        notices: Notices,
        generation: int,
        holders: tuple[int, ...],
    ) -> None:
        """Begins with nothing reported.

        Args:
            events: gets each change, and an edge of each rank.
            notices: lines for the user; rank 0 gives them.
            generation: its number.
            holders: the processes that are to keep copies of this rank's slots, at its begin.
        """
        self._holders = holders
        self._shape = shape
        self._events = events
        self._notices = notices
        self._generation = generation
        self._known: Protection | None = None

    def begin(self) -> None:
        """Reports once in a job what its shape makes of any loss."""
        told = tied_ends(self._shape.stages, self._shape.ends)
        if told and self._generation == 0 and dist.get_rank() == 0:
            self._notices.say(told)

    def at_edge(self, step: int, window: Window, copies: int, memory: HostMemory) -> None:
        """Takes note of a window that was persisted.

        Args:
            step: the newest committed one.
            copies: the fewest of one of its slots, of all ranks.
            memory: of this process: its files, and who keeps copies of this rank's slots now.
        """
        folder = memory.store.folder
        forget_origin(folder, window.start)
        self._compare(step, memory.copies.holders)
        found = protection_of(self._shape, copies)
        lag = step - window.last
        edge = {"start": window.start, "size": window.size, "lag": lag}
        self._events.emit(EventName.WINDOW_PERSISTED, step, **edge, copies=copies)
        told = {
            "level": found.level.value,
            "copies": found.copies,
            "wanted": found.wanted,
            "spares": found.spares,
            "costs": list(found.costs),
            **edge,
        }
        if found != self._known:
            self._events.emit(EventName.PROTECTION, step, **told)
            if dist.get_rank() == 0:
                full = found.level is ProtectionLevel.FULL
                tell = self._notices.say if full else self._notices.warn
                tell(f"step {step}: {found.line}")
        self._known = found
        if dist.get_rank() == 0:
            now = {"time": time.time(), "generation": self._generation, "step": step}
            write_status(folder, {**now, **told, "line": found.line})

    def _compare(self, step: int, holders: tuple[int, ...]) -> None:
        """Records that others keep copies of this rank's slots than before."""
        if holders != self._holders:
            fields = {"holders": holders, "former": self._holders}
            self._events.emit(EventName.HOLDERS_CHANGED, step, **fields)
        self._holders = holders
