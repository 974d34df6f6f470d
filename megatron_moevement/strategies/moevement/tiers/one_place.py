# SPDX-License-Identifier: Apache-2.0
"""One place: at the start of a launch the ranks find out whether their tiers lie together."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from megatron_moevement.errors import UserError
from megatron_moevement.policy.tiers.sharing import Mark, apart
from megatron_moevement.runtime.coordination.agreement import all_gather_json, broadcast_json
from megatron_moevement.runtime.tiers.marks import attempt, leave_mark, marked, remove_marks
from megatron_moevement.runtime.tiers.target import Target

logger = logging.getLogger(__name__)
PATIENCE_S = 20.0
"""For each of the calls; a target that takes longer is one that fails, which is harmless."""


def check_one_place(target: Target, launch: str, host: str, device: torch.device) -> None:
    """Sees to it that all ranks write to the same place; every rank calls it.

    Rank 0 leaves no mark: it looks at a folder that it has not seen before, so that no cache of a
    network file system has an older content of it.

    Args:
        launch: stands for this launch, the same on all ranks.
        host: name of this machine.

    Raises:
        UserError: on all ranks: they do not.
    """
    rank = dist.get_rank()
    failure = None
    if rank:
        failure = attempt(lambda: leave_mark(target, launch, rank), PATIENCE_S)[1]
    marks = [Mark(*told) for told in all_gather_json([host, failure], device)]
    seen: tuple[list[int] | None, str | None] = (None, None)
    if rank == 0:
        seen = attempt(lambda: marked(target, launch), PATIENCE_S)
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
