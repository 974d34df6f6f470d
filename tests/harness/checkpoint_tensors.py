# SPDX-License-Identifier: Apache-2.0
"""The tensors in a checkpoint, read without a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of a checkpoint: weights, master weights and moments."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(state, checkpoint_id=checkpoint, no_dist=True)
    return state
