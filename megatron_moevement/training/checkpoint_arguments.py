# SPDX-License-Identifier: Apache-2.0
"""`--use-checkpoint-args`: the network is what the checkpoint in `--load` says it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_moevement.integrations.megatron.unsharded_state import read_unsharded_state
from megatron_moevement.training.checkpoints import CheckpointFolder
from megatron_moevement.training.megatron_arguments import described_model
from megatron_moevement.training.model_description import NETWORK


def network_in(load: str, ckpt_step: int | None) -> dict[str, Any]:
    """Returns the flags of the network in a folder of checkpoints; none where it has none.

    Args:
        ckpt_step: the iteration; None: the one to resume from.
    """
    folder = CheckpointFolder(Path(load))
    for iteration in folder.candidates():
        if ckpt_step not in {None, iteration}:
            continue
        common = read_unsharded_state(folder.path(iteration))
        if common is not None:  # a damaged one is passed over when checkpoints are loaded, too
            own = common.own
            return _flags(described_model(common.args) if own is None else own["model"])
    return {}


def _flags(model: dict[str, Any]) -> dict[str, Any]:
    learned = model.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    names = (*NETWORK, "max_position_embeddings") if learned else NETWORK
    return {name: model[name] for name in names if name in model}
