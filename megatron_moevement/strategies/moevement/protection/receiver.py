"""Where a process receives copies; `policy/copies/loopback.py` says whether others reach it."""

from __future__ import annotations

from megatron_moevement.policy.copies.loopback import Receiver
from megatron_moevement.runtime.transport.interface import own_address, own_network


def own_receiver(interface: str, process: int) -> Receiver:
    """Returns where this process receives copies.

    Args:
        interface: of this machine.
        process: number of this process.

    Raises:
        UserError: the interface is none of this machine's.
    """
    return Receiver(process, own_network(), own_address(interface))
