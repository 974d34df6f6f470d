# SPDX-License-Identifier: Apache-2.0
"""The mends that a struck job can do without, to see that the explorer finds what they mend."""

from __future__ import annotations

from enum import Enum


class Mend(Enum):
    """A mend, by its name; `mends` takes it out."""

    GRAPH_START = "graph-start"
    """Autograd graphs of a stage's ranks begin in one layer while operators are frozen."""
    TRANSFER_RETRIES = "transfer-retries"
    """A transfer that fails is tried again, and no slot is complete without a copy."""
    JOURNAL_FIRST = "journal-first"
    """A state that was rolled forward is published once the journal has its step."""
    ADOPTION_IN_PLACE = "adoption-in-place"
    """Who comes in new takes over what the dead left, and a job that can't go on says so."""
