# SPDX-License-Identifier: Apache-2.0
"""Measurements that are given instead of taken: a job's choice of W by them is the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch.distributed as dist

from megatron_moevement.policy.watching.measurements import NOT_MEASURED, Measured
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing
from megatron_moevement.strategies.strategy import Covered

ITERATION_S = 1.0
"""That each rank measures, without stalls."""
_PHASE_STEPS = 7
_MARGINS = (0.4, 1.2, 2.0, 4.0, 40.0)


class Given(NamedTuple):
    """What a rank is to measure.

    Attributes:
        margin: how often the largest slot of the planned schedule is copied and sent within an
            iteration.
        stall_s: of an iteration.
    """

    margin: float
    stall_s: float


def measure(given_at: Callable[[int], Given]) -> None:
    """Makes each rank of this process measure what is given for a step."""
    await_commit = SparseCheckpointing.await_commit

    def measuring(self: SparseCheckpointing, step: int) -> Covered:
        covered = await_commit(self, step)
        if covered.measured == NOT_MEASURED:
            return covered
        margin, stall_s = given_at(step)
        rate = self._session.memory.plan.schedule.worst_slot_bytes * margin / ITERATION_S
        measured = Measured(rate, rate, ITERATION_S, stall_s)
        return dataclasses.replace(covered, measured=measured.vote)

    SparseCheckpointing.await_commit = measuring  # type: ignore[method-assign]


def drawn(seed: int) -> Callable[[int], Given]:
    """Returns bandwidths that change every few steps; those of ranks differ a little.

    Slots that don't fit into an iteration stall it.
    """

    def given_at(step: int) -> Given:
        random = Random(f"{seed} {step // _PHASE_STEPS}")  # noqa: S311  (reproducible, not secret)
        margin = random.choice(_MARGINS) * (1 + dist.get_rank() % 3 / 20)
        return Given(margin, max(0.0, ITERATION_S / margin - ITERATION_S))

    return given_at
