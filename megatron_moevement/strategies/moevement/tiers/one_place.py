# SPDX-License-Identifier: Apache-2.0
"""One place: at the start of a launch the ranks find out whether their tiers lie together."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.policy.tiers.sharing import Mark, apart
from megatron_moevement.runtime.coordination.agreement import all_gather_json, broadcast_json
from megatron_moevement.runtime.patience import attempt
from megatron_moevement.runtime.tiers.marks import find_marks, leave_mark, remove_marks
from megatron_moevement.runtime.tiers.target import Target

logger = logging.getLogger(__name__)
PATIENCE_S = 20.0
"""For each of the calls; a target that takes longer is one that fails, which is harmless."""
LOOKS_S = 10.0
"""For marks that a file system may show late; less than the patience."""


def check_one_place(target: Target, launch: str, host: str, device: torch.device) -> None:
    """Sees to it that all ranks write to the same place; every rank calls it.

    Rank 0 looks at a folder that it has not seen before and makes one of its own beside it, so that
    what it remembers of a network file system, also that something is not there, is renewed; and
    it looks again for a while before it believes that marks are missing.

    Args:
        launch: stands for this launch, the same on all ranks.
        host: name of this machine.

    Raises:
        UserError: on all ranks: they do not.
    """
    rank = dist.get_rank()
    beside = launch if rank else f"{launch}-first"
    failure = attempt(lambda: leave_mark(target, beside, rank), PATIENCE_S)[1]
    marks = [Mark(*told) for told in all_gather_json([host, failure], device)]
    seen: tuple[list[int] | None, str | None] = (None, None)
    if rank == 0:
        left = {number for number, mark in enumerate(marks) if number and mark.failure is None}
        seen = attempt(lambda: find_marks(target, launch, left, LOOKS_S), PATIENCE_S)
    found, blind = broadcast_json(seen, 0, device)
    refused = None if found is None else apart(marks, found)
    if rank == 0 or refused is not None:
        attempt(lambda: remove_marks(target), PATIENCE_S)
    if refused is not None:
        raise UserError(
            f"--moevement-tier-dir {target.place} is not the same folder for all ranks: {refused}; "
            "give a folder that all machines share, or a URL of an object store, see "
            "docs/operate/tiers.md"
        )
    failure = blind or next((mark.failure for mark in marks if mark.failure), None)
    if rank == 0 and failure is not None:
        logger.warning(
            "--moevement-tier-dir %s: whether it is the same for all ranks is not known: %s; "
            "training goes on",
            *(target.place, failure),
        )
