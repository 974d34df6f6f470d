# SPDX-License-Identifier: Apache-2.0
"""Agrees in each generation on what the job may rely on; decided in `policy/job/guarantee.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain

from megatron_moevement.policy.job.guarantee import Computations, Guarantee, decide_guarantee
from megatron_moevement.strategies.moevement.carried_state import (
    NO_PROMISE,
    CarriedState,
    Promise,
)


def judge(job: Computations, carried: CarriedState, left: Sequence[str] = ()) -> list[str] | None:
    """Returns what a survivor finds lacking, which compares with the generation before.

    Args:
        job: all ranks, as they compute in the present generation.
        left: what memory on this machine lacks, which others have computed.

    Returns:
        None on a newcomer whose machine has no such memory.
    """
    if carried.promise == NO_PROMISE:
        return [*decide_guarantee(job).lacking, *left] if left else None
    return list(decide_guarantee(job, carried.promise.origin, carried.promise.guarantee).lacking)


def agree_on_guarantee(
    job: Computations, judged: Iterable[Sequence[str] | None], carried: CarriedState
) -> Guarantee:
    """Returns what the job may rely on from now on, the same on all ranks.

    A newcomer takes over what survivors find: where they find no difference, the present generation
    stands for the first one, and else the level is lost for good.

    Args:
        job: all ranks, as they compute in the present generation.
        judged: what `judge` returns on all ranks, each once.
        carried: what this process takes over a restart; learns the result.
    """
    found = [lacking for lacking in judged if lacking is not None]
    if found:  # survivors have looked at the whole job
        guarantee = Guarantee(tuple(dict.fromkeys(chain.from_iterable(found))))
    else:
        guarantee = decide_guarantee(job)
    carried.promise = Promise(job, guarantee)
    return guarantee


def agree_with_origin(origin: Computations, carried: CarriedState) -> Guarantee:
    """Returns what a job may rely on that goes on from what other processes have computed.

    Args:
        origin: what they computed with, in the order of ranks; the same on all ranks.
        carried: what this process takes over a restart; learns the result.
    """
    promise = carried.promise
    guarantee = decide_guarantee(promise.origin, origin, promise.guarantee)
    carried.promise = dataclasses.replace(promise, guarantee=guarantee)
    return guarantee
