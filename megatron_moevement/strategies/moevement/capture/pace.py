# SPDX-License-Identifier: Apache-2.0
"""Whether the copies of slots keep up with training."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_WINDOWS = 3
"""So many in a row that were waited for: a single one may be an accident."""


class Pace:
    """Of one process in one generation; the training thread calls it."""

    def __init__(self) -> None:
        self._awaited = 0
        self._is_told = False

    def note(self, step: int, *, waited: bool) -> None:
        """Notes whether the commit of a step waited for copies; warns once if that is the rule.

        Args:
            step: before whose commit the ring was full.
            waited: for copies that no failed transfer held up.
        """
        self._awaited = self._awaited + 1 if waited else 0
        if self._awaited < _WINDOWS or self._is_told:
            return
        self._is_told = True
        logger.warning(
            "replication is slower than training: up to step %d training has waited for the copies "
            "of %d windows in a row; raise --moevement-window, or --moevement-max-window where W "
            "is chosen, lower --moevement-replicas, or receive copies at a faster "
            "--moevement-replication-interface",
            step,
            _WINDOWS,
        )
