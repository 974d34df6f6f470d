# SPDX-License-Identifier: Apache-2.0
"""`--moevement-state-digest`: one JSON file that two runs share exactly when their states do.

{"iteration": k, "loss": {"1": "<FP32 bits, hex>", ...},
 "ranks": {"<logical rank>": {"<operator>": "<SHA-256>", "scalars": "<SHA-256>"}}}

`scalars` covers what decides later bits besides tensors: loss scalers, random streams, the schedule
of learning rate and weight decay, Adam's step, consumed samples and skipped steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megatron_moevement.runtime.coordination.agreement import (
    all_gather_json,
    as_user_error,
    on_first_rank,
)
from megatron_moevement.runtime.coordination.ledger import loss_to_hex
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.strategies.scalars import SlotScalars
from megatron_moevement.training.checkpoints import check_writable, write_atomically
from megatron_moevement.training.job import Job


def check_state_digest_path(job: Job, path: Path) -> None:
    """Checks before training that the digest can be written after it; every rank calls it.

    Raises:
        UserError: it can't.
    """

    def check() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        check_writable(path.parent)

    _on_first_rank(check, job, path)


def state_digests(job: Job, progress: Progress) -> dict[str, str]:
    """Returns the SHA-256 of each operator and of the scalars of S_k; every rank calls it."""
    scalars = SlotScalars.of(progress, job.optimizer, job.scheduler)
    return {**job.digests(), "scalars": scalars.digest}


def write_state_digest(job: Job, progress: Progress, path: Path) -> None:
    """Writes the digest of S_k; every rank calls it, rank 0 writes.

    Raises:
        UserError: on all ranks, if the file can't be written.
    """
    own = {str(job.position.logical_rank): state_digests(job, progress)}
    ranks: dict[str, dict[str, str]] = {}
    for one in all_gather_json(own, job.device):
        ranks |= one
    losses = job.ledger.losses()
    digest = {
        "iteration": progress.committed,
        "loss": {str(step): loss_to_hex(losses[step]) for step in sorted(losses)},
        "ranks": {rank: ranks[rank] for rank in sorted(ranks)},
    }

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(digest, indent=1) + "\n")

    _on_first_rank(write, job, path)


def _on_first_rank(action: Callable[[], None], job: Job, path: Path) -> None:
    with as_user_error(f"--moevement-state-digest {path}: "):
        on_first_rank(action, job.device)
