# SPDX-License-Identifier: Apache-2.0
"""Notices: lines for the user that are about the whole job, and not about one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Notices:
    """Prints lines for the user, each on one rank of those that give it.

    Attributes:
        say: a line that warns of nothing.
        warn: a line that somebody should act on; it is shown where others are left out.
    """

    say: Callable[[str], None]
    warn: Callable[[str], None]
