"""Checks that all processes reach each other; decided in `policy/reachability.py`."""

from __future__ import annotations

import dataclasses

import torch

from megatron_moevement.errors import UserError
from megatron_moevement.policy.reachability import Receiver, check_reachable
from megatron_moevement.runtime.agreement import AgreementError, gather_together
from megatron_moevement.runtime.replication.interface import own_address, own_network


def check_interface(interface: str, process: int, device: torch.device) -> None:
    """Checks the interfaces of all processes before anything is written; every rank calls it.

    Args:
        interface: where this process is to receive copies.
        process: number of this process.
        device: where collectives keep their tensors.

    Raises:
        UserError: on all ranks: one is none of its machine's, or others don't reach it.
    """
    try:
        told = gather_together(
            lambda: dataclasses.asdict(Receiver(process, own_network(), own_address(interface))),
            device,
        )
    except AgreementError as error:
        raise UserError(error.reason) from error
    check_reachable([Receiver(**one) for one in told])
