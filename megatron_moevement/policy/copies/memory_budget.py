# SPDX-License-Identifier: Apache-2.0
"""Memory: how many bytes of host memory fault tolerance takes, process by process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron_moevement.errors import UserError


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """Host memory of one process, in bytes.

    Attributes:
        own_slots_bytes: ring of its own rank's slots; 0 for a spare.
        held_slots_bytes: rings of the ranks that it keeps copies for.
        logs_bytes: boundary tensors that its rank sent.
        ledger_bytes: ledger entries, its own and those it keeps for others.
    """

    own_slots_bytes: int = 0
    held_slots_bytes: int = 0
    logs_bytes: int = 0
    ledger_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.own_slots_bytes + self.held_slots_bytes + self.logs_bytes + self.ledger_bytes


def check_budget(accounts: Mapping[int, MemoryAccount], budget_bytes: int) -> None:
    """Checks that no process needs more host memory than it may take.

    Raises:
        UserError: a process needs more.
    """
    worst = max(accounts, key=lambda process: (accounts[process].total_bytes, -process))
    account = accounts[worst]
    if account.total_bytes > budget_bytes:
        raise UserError(
            f"process {worst} needs {account.total_bytes} bytes of host memory and may take "
            f"{budget_bytes}: {account.own_slots_bytes} for its slots, "
            f"{account.held_slots_bytes} for copies, {account.logs_bytes} for logs, "
            f"{account.ledger_bytes} for the ledger; lower --moevement-replicas, give "
            "--moevement-window a smaller W, or raise the budget"
        )
