# SPDX-License-Identifier: Apache-2.0
"""Measurements that are given instead of taken: a job's choice of W by them is the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch.distributed as dist

from megatron_moevement.policy.watching.measurements import Contention, Measured
from megatron_moevement.runtime.observation.cpu_times import CpuShare
from megatron_moevement.strategies.moevement.sparse_checkpointing import SparseCheckpointing
from megatron_moevement.strategies.strategy import Covered

ITERATION_S = 1.0
"""That each rank measures, without stalls, unless another one is given."""
TAKEN_SHARE = 0.001
"""Of an iteration as it was: too little to count."""
_PHASE_STEPS = 7
_MARGINS = (0.1, 0.4, 1.2, 2.0, 4.0, 40.0)


class Given(NamedTuple):
    """What a rank is to measure.

    Attributes:
        host: how often the largest slot of the planned schedule is copied within an iteration.
        link: how often it is sent to each holder.
        stall_s: of an iteration.
        iteration_s: without stalls.
    """

    host: float
    link: float
    stall_s: float
    iteration_s: float = ITERATION_S


def measure(given_at: Callable[[int], Given]) -> None:
    """Makes each rank of this process measure what is given for a step."""
    await_commit = SparseCheckpointing.await_commit

    def measuring(self: SparseCheckpointing, step: int) -> Covered:
        covered = await_commit(self, step)
        found = Measured.worst(covered.measured)
        if found is None:
            return covered
        given = given_at(step)
        slot_bytes = self._session.memory.plan.schedule.worst_slot_bytes
        host, link = (slot_bytes * times / ITERATION_S for times in (given.host, given.link))
        measured = Measured(host, link, given.iteration_s, given.stall_s, found.contention_s)
        return dataclasses.replace(covered, measured=measured.vote)

    CpuShare.contention = lambda self: Contention(TAKEN_SHARE)  # type: ignore[method-assign]
    SparseCheckpointing.await_commit = measuring  # type: ignore[method-assign]


def drawn(seed: int) -> Callable[[int], Given]:
    """Returns bandwidths that change every few steps; those of ranks differ a little.

    Slots that don't fit into an iteration stall it.
    """

    def given_at(step: int) -> Given:
        random = Random(f"{seed} {step // _PHASE_STEPS}")  # noqa: S311  (reproducible, not secret)
        own = 1 + dist.get_rank() % 3 / 20
        host, link = (random.choice(_MARGINS) * own for _ in range(2))
        return Given(host, link, max(0.0, ITERATION_S / min(host, link) - ITERATION_S))

    return given_at
