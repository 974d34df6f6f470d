# SPDX-License-Identifier: Apache-2.0
"""Flags that say how long an iteration takes and how fast slots are copied and sent."""

from __future__ import annotations

import argparse

from megatron_moevement.settings.flags import POSITIVE, reader

GB = 1e9
_AMOUNT = reader(float, POSITIVE)


def add_bandwidth_flags(group: argparse._ArgumentGroup, unmeasured: str = "no limit") -> None:
    """Adds `--iteration-time`, `--bandwidth` and `--network-bandwidth`.

    Args:
        unmeasured: what the network brings where it is not given.
    """
    group.add_argument("--iteration-time", type=_AMOUNT, metavar="SECONDS", help="of one")
    group.add_argument(
        "--bandwidth", type=_AMOUNT, metavar="GB/S", help="device to host, each rank, effective"
    )
    group.add_argument(
        "--network-bandwidth",
        type=_AMOUNT,
        metavar="GB/S",
        help=f"each rank (default: {unmeasured})",
    )
