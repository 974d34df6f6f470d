# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of every operator's state: two runs agree exactly when their digests do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from megatron_moevement.integrations.megatron.inventory import OperatorState


def operator_digest(state: OperatorState) -> str:
    """Returns the SHA-256, as hex, over names, types, shapes and bits of an operator's state."""
    digest = hashlib.sha256()
    for part in (state.compute, state.optimizer):
        _update(digest, part)
    return digest.hexdigest()


def operator_digests(states: Sequence[OperatorState]) -> dict[str, str]:
    """Returns the digest of every operator of this rank, by the operator's name."""
    return {str(state.operator): operator_digest(state) for state in states}


def _update(digest: hashlib._Hash, part: Mapping[str, torch.Tensor | float]) -> None:
    for name in sorted(part):
        value = part[name]
        if isinstance(value, torch.Tensor):
            bits = value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(bits.data)
        else:
            digest.update(f"{name} {float(value).hex()}\n".encode())
