# SPDX-License-Identifier: Apache-2.0
"""Background write: a thread writes this rank's part of a checkpoint while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from megatron_moevement.errors import MoEvementError
from megatron_moevement.integrations.megatron.sharded_writing import CopiedData
from megatron_moevement.runtime.closing import Closing
from megatron_moevement.training.checkpoint_saving import BegunSave, Written

_LOOK_S = 0.05
_PATIENCE_S = 1.0
"""A call of the file system that takes longer ends by itself, after its generation."""


class GivenUpError(MoEvementError):
    """The generation of a write is over."""


class BackgroundWrite(Closing):
    """One write of one rank; the training thread uses it.

    The thread holds the copy of the state, and lets go of it as soon as it has ended.
    """

    def __init__(self, begun: BegunSave, data: CopiedData) -> None:
        """Starts the thread; nothing interrupts it."""
        self.begun = begun
        self.took = timedelta()
        """How long it wrote, once it is over."""
        self._outcome: Written | Exception | None = None
        self._is_given_up = False
        self._thread = threading.Thread(
            target=self._run, args=(data,), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the part is written, or could not be."""
        return self._outcome is not None

    def wait(self, beat: Callable[[], None]) -> None:
        """Waits until it is over, in a way that a restart can interrupt.

        Args:
            beat: is called now and then.
        """
        while not self.is_over:
            beat()
            time.sleep(_LOOK_S)

    def take(self) -> Written:
        """Returns what was written, or raises why it could not be; called when it is over."""
        outcome = self._outcome
        assert outcome is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Ends the thread; what it has not written yet is given up, and never counts."""
        self._is_given_up = True
        self._thread.join(_PATIENCE_S)

    def _run(self, data: CopiedData) -> None:
        began_s = time.monotonic()
        outcome: Written | Exception
        try:
            outcome = self.begun.write(data, self._proceed)
        except Exception as error:  # noqa: BLE001  (raised again by `take`, for all ranks)
            outcome = error
        del data
        self.took = timedelta(seconds=time.monotonic() - began_s)
        self._outcome = outcome

    def _proceed(self) -> None:
        if self._is_given_up:
            raise GivenUpError("the generation is over")
