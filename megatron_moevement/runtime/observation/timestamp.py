# SPDX-License-Identifier: Apache-2.0
"""Timestamps: when something happened, in lines and documents for people and programs."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(time_s: float) -> str:
    """Returns a time in UTC, to the millisecond.

    Args:
        time_s: seconds since the epoch.
    """
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
