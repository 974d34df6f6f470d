# SPDX-License-Identifier: Apache-2.0
"""Reachability: whether the processes of a job reach each other where they receive copies."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence

from megatron_moevement.errors import UserError


@dataclasses.dataclass(frozen=True)
class Receiver:
    """Where a process receives copies.

    Attributes:
        network: names its loopback interface; those with the same name reach each other by it.
    """

    process: int
    network: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of the same network reach it."""
        address = ipaddress.ip_address(self.address)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            return address.ipv4_mapped.is_loopback
        return address.is_loopback


def check_reachable(receivers: Sequence[Receiver]) -> None:
    """Refuses a loopback address in a job on several machines: no copy would reach it.

    Raises:
        UserError: there is one.
    """
    machines = len({receiver.network for receiver in receivers})
    hidden = next((receiver for receiver in receivers if receiver.is_loopback), None)
    if machines > 1 and hidden is not None:
        raise UserError(
            f"--moevement-replication-interface: process {hidden.process} receives copies at "
            f"{hidden.address}, which its own machine alone reaches, and the job is on {machines} "
            "machines: give each process an address of its machine in the network between them"
        )
