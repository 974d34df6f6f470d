# SPDX-License-Identifier: Apache-2.0
"""The ledger: the scalars of every committed step, and the loss of every iteration.

A replay injects these scalars instead of computing them again with ranks that do not take part in
it; a resumed run takes the loss history from it.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

from megatron_moevement.policy.window.popularity import Popularity


def loss_to_hex(loss: float) -> str:
    """Returns the bits of an FP32 loss as eight hexadecimal digits, so that equal means equal."""
    return struct.pack(">f", loss).hex()


def loss_from_hex(text: str) -> float:
    """Returns the FP32 loss of its bits."""
    return float(struct.unpack(">f", bytes.fromhex(text))[0])


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """What the schedules set for one group of parameters."""

    lr: float
    weight_decay: float


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """The scalars of step k, the same on every rank but for the random state.

    Attributes:
        loss: mean loss per token, FP32 (None: the step's loss is no number of this job's model).
        consumed_samples: data cursor before the step.
        loss_scale: what the step's loss was multiplied with.
        found_inf: for each chained optimizer, whether its gradients overflowed.
        grad_norm: global norm of the gradients (None: overflow).
        clip_factor: what clipping multiplied the gradients with.
        num_tokens: tokens by which the losses were normalised, over the whole batch.
        groups: learning rate and weight decay that the step used, for each group.
        scalers: state of each chained optimizer's scaler after the step.
        random_state: this rank's random streams at the start of the step.
        rng_equal: whether replicas were found to have the same random streams in S_k.
        popularity: what is known of the experts from the first step of a window on; None in all
            other steps, and where nothing is counted.
    """

    step: int
    loss: float
    consumed_samples: int
    loss_scale: float
    found_inf: tuple[bool, ...]
    grad_norm: float | None
    clip_factor: float
    num_tokens: int
    groups: tuple[ParameterGroup, ...]
    scalers: tuple[Mapping[str, Any] | None, ...]
    random_state: Any
    rng_equal: bool = False
    popularity: Popularity | None = None


class Ledger:
    """The entries of the newest steps and the loss of all; used by the training thread only."""

    def __init__(self, retained_steps: int) -> None:
        """Keeps the entries of the newest `retained_steps` steps, and every loss."""
        self._retained_steps = retained_steps
        self._entries: dict[int, LedgerEntry] = {}
        self._losses: dict[int, float] = {}

    def append(self, entry: LedgerEntry) -> None:
        """Adds the entry of a step; adding a step again replaces it."""
        self._entries[entry.step] = entry
        self._losses[entry.step] = entry.loss
        self._entries.pop(entry.step - self._retained_steps, None)

    def __getitem__(self, step: int) -> LedgerEntry:
        """Returns the entry of a step.

        Raises:
            KeyError: the step is older than what is retained, or not committed.
        """
        return self._entries[step]

    @property
    def newest(self) -> int:
        """The newest step whose loss is there; 0 before the first."""
        return max(self._losses, default=0)

    def losses(self) -> dict[int, float]:
        """Returns the loss of every iteration so far."""
        return dict(self._losses)

    def restore_losses(self, losses: Mapping[int, float]) -> None:
        """Takes over the loss history of a checkpoint."""
        self._losses = dict(losses)
        self._entries.clear()
