# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a run come from: its seed, or a checkpoint of another training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_moevement.integrations.megatron.unsharded_state import read_unsharded_state
from megatron_moevement.settings.checkpointing import Checkpointing
from megatron_moevement.training.checkpoints import CheckpointFolder, checkpoint_files

INITIAL = "the seed"


def find_origin(settings: Checkpointing, lineage: str) -> str:
    """Returns what tells this run from others that the same flags and data give.

    A checkpoint carries the lineage and the origin of the run that saved it. Who goes on from a
    checkpoint of the same lineage goes on with the same run. Any other checkpoint is an origin.

    Args:
        lineage: digest of everything else that decides bits.
    """
    if settings.load is None:
        return INITIAL
    folder = CheckpointFolder(Path(settings.load))
    for iteration in folder.candidates():
        if settings.ckpt_step not in {None, iteration}:
            continue
        run = _run_of(folder.path(iteration))
        if run is None:
            continue  # a damaged one is passed over when checkpoints are loaded, too
        if run.get("lineage") == lineage and not settings.finetune:
            return str(run["origin"])
        taken = [
            name.replace("_", " ")
            for name in ("finetune", "no_load_optim", "no_load_rng")
            if getattr(settings, name)
        ]
        return " ".join([f"iteration {iteration}, {_digest(folder, iteration)}", *taken])
    return INITIAL


def _run_of(checkpoint: Path) -> dict[str, Any] | None:
    """Returns what a checkpoint says of its run; None where it can't be read."""
    common = read_unsharded_state(checkpoint)
    return None if common is None else dict((common.own or {}).get("run") or {})


def _digest(folder: CheckpointFolder, iteration: int) -> str:
    """Returns a digest of a checkpoint's files: of their checksums, or else of their sizes."""
    path = folder.path(iteration)
    manifest = folder.manifest(iteration)
    if manifest is not None:
        told: dict[str, Any] = {name: vars(record) for name, record in manifest.items()}
    else:
        told = {name: (path / name).stat().st_size for name in checkpoint_files(path)}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
