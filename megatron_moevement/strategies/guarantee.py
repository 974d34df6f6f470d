"""Agrees in each generation on what the job may rely on; decided in `policy/guarantee.py`."""

from __future__ import annotations

import torch

from megatron_moevement.policy.guarantee import Computation, Guarantee, decide_guarantee
from megatron_moevement.runtime.agreement import all_gather_json
from megatron_moevement.strategies.kept import Kept


def agree_on_guarantee(own: Computation, kept: Kept, device: torch.device) -> Guarantee:
    """Returns what the job may rely on from now on; every rank calls it, in step.

    Survivors compare with the generation before. A newcomer takes over what they find: where they
    find no difference, the present generation stands for the first one, and else the level is
    lost for good.

    Args:
        own: of this process.
        kept: what this process takes over a restart; learns the result.
        device: where collectives keep their tensors.
    """
    job = tuple(Computation.from_document(one) for one in all_gather_json(own.document(), device))
    judged = None
    if kept.origin is not None or kept.guarantee is not None:
        judged = decide_guarantee(job, kept.origin, kept.guarantee)
    told = all_gather_json(None if judged is None else list(judged.lacking), device)
    known = [reason for lacking in told if lacking is not None for reason in lacking]
    guarantee = decide_guarantee(job, None, Guarantee(tuple(dict.fromkeys(known))))
    kept.origin, kept.guarantee = job, guarantee
    return guarantee
