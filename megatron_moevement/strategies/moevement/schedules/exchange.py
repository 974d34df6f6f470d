# SPDX-License-Identifier: Apache-2.0
"""The exchange of proposed schedules: one rank makes them, all others read them, off their steps.

The job's store has a proposal before the rank that makes it votes for it. A rank learns at the
commit barrier that there is one, and only then reads it: nobody polls.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from megatron_moevement.policy.job.operators import Inventory
from megatron_moevement.policy.window.schedule import WindowSchedule
from megatron_moevement.policy.window.schedule_document import decode_schedule, encode_schedule
from megatron_moevement.policy.window.timetable import Proposal

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""For a thread to come back from the job's store, whose host may have died."""


class Proposed(NamedTuple):
    """A proposed schedule that this process has in whole."""

    proposal: Proposal
    schedule: WindowSchedule


class ScheduleExchange:
    """Of one generation; the training thread begins what a thread of its own carries out."""

    def __init__(self, name: str, inventory: Inventory) -> None:
        """Begins with nothing proposed.

        Args:
            name: nothing else in the job's store may begin with it.
            inventory: what schedules are made for.
        """
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  (the only way)
        self._name = name
        self._inventory = inventory
        self._thread: threading.Thread | None = None
        self.proposed: Proposed | None = None
        """The newest, once it is here; set by one assignment."""

    def propose(self, version: int, make: Callable[[], Proposed | None]) -> None:
        """Has a schedule made and put where all read it.

        Args:
            make: returns it; None where none is to be proposed after all.
        """

        def run() -> None:
            proposed = make()
            if proposed is None:
                return
            encoded = encode_schedule(proposed.schedule)
            text = json.dumps([proposed.proposal.document(), encoded.hex()])
            self._store.set(self._key(version), text)
            self.proposed = proposed

        self._begin(run)

    def fetch(self, version: int) -> None:
        """Has a proposed schedule read, which is in the store by now."""

        def run() -> None:
            document, text = json.loads(self._store.get(self._key(version)))
            proposal = Proposal.of_document(document)
            schedule = decode_schedule(bytes.fromhex(text), self._inventory, proposal.digest)
            self.proposed = Proposed(proposal, schedule)

        self._begin(run)

    def close(self) -> None:
        """Ends the thread, if it does not wait for a store that is gone."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _begin(self, run: Callable[[], None]) -> None:
        """Carries something out, one thing at a time; what fails is tried again when asked for."""
        if self._thread is not None and self._thread.is_alive():
            return

        def attempt() -> None:
            try:
                run()
            except dist.DistError as error:  # the store's process is lost, as in any restart
                reason, _, _ = str(error).partition("\n")
                logger.warning("a proposed schedule is not agreed on yet: %s", reason)
            except Exception:
                logger.warning("a proposed schedule is not agreed on yet", exc_info=True)

        self._thread = threading.Thread(target=attempt, name="moevement-schedule", daemon=True)
        self._thread.start()

    def _key(self, version: int) -> str:
        return f"{self._name}/schedule/{version}"
