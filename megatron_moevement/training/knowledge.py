# SPDX-License-Identifier: Apache-2.0
"""Knowledge: what the processes of a generation tell each other before they do anything else.

Those that were there before know what the job is. Those that come in new take it over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron_moevement.integrations.megatron.group_keys import GatheredKeys
from megatron_moevement.policy.outcome.futility import Futility
from megatron_moevement.runtime.coordination.agreement import broadcast_json, gather_read
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.training.run_identity import check_flags


@dataclasses.dataclass(frozen=True)
class Known:
    """What a process knows of the job.

    Attributes:
        identity: of the run; None before this process was in a generation.
        keys: `Job.keys` of what this process has built; None: it has built nothing.
        futility: what came of the restarts so far.
    """

    identity: RunIdentity | None
    keys: GatheredKeys | None
    futility: Futility


def share(own: Known, flags: str, committed: int, processes: int, device: torch.device) -> Known:
    """Returns what the job knows, the same on all ranks; every rank calls it, in step.

    Args:
        flags: the digest of those that decide bits.
        committed: the newest step that this process knows of.
        processes: how many there are, spares included.

    Raises:
        UserError: on all ranks: their flags differ.
    """
    rank_knows = 2 * (own.identity is not None) + (own.keys is not None)
    digests: list[str] = []
    known: list[int] = []
    before: set[tuple[int, ...]] = set()
    steps: set[int] = set()

    def read(_: int, told: Sequence[Any]) -> None:
        digest, knows, futility, step = told
        digests.append(digest)
        known.append(knows)
        before.add(tuple(futility))
        steps.add(step)

    gather_read([flags, rank_knows, own.futility.document(), committed], device, read)
    check_flags(digests)
    futility = Futility.agreed(before, steps, processes)
    best = max(known)
    if known.count(best) == len(known):  # nobody comes in new, or all do
        return dataclasses.replace(own, futility=futility)
    source = known.index(best)
    document = None if own.identity is None else [own.identity.document(), own.keys]
    identity, keys = broadcast_json(document, source, device)
    return Known(RunIdentity.of_document(identity), keys, futility)
