# SPDX-License-Identifier: Apache-2.0
"""Scalars as JSON: what goes with a slot, and the ledger's entries as the journal keeps them.

They travel to other processes and outlive their own, so nothing of them is pickled. JSON gives
back the same floats.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_moevement.integrations.megatron.optimizer import SplitOptimizer
from megatron_moevement.integrations.megatron.random_state import (
    decode_random_state,
    encode_random_state,
    random_state,
)
from megatron_moevement.integrations.megatron.scheduler import Scheduler
from megatron_moevement.policy.window.popularity import Popularity
from megatron_moevement.runtime.coordination.ledger import LedgerEntry, ParameterGroup
from megatron_moevement.runtime.coordination.progress import Progress


@dataclasses.dataclass(frozen=True)
class SlotScalars:
    """What belongs to S_k on one rank besides tensors.

    Attributes:
        progress: of S_k.
        adam_step: the optimizer's step counter, the same for all operators.
        scalers: state of each chained optimizer's loss scaler.
        scheduler: position in the schedules of learning rate and weight decay.
        random_state: this rank's random streams, as step k + 1 finds them.
        state: stands for the masters and buffers of this rank in S_k, in the last slot of a window
            for its moments as well; None where it was not computed.
    """

    progress: Progress
    adam_step: int
    scalers: tuple[Mapping[str, Any] | None, ...]
    scheduler: Mapping[str, Any]
    random_state: Mapping[str, Any]
    state: str | None = None

    @classmethod
    def of(cls, progress: Progress, optimizer: SplitOptimizer, scheduler: Scheduler) -> SlotScalars:
        """Returns the scalars of the live state.

        While a window is converted operators count different steps: the counter has no use then.
        """
        return cls(
            progress=progress,
            adam_step=optimizer.first_adam_step(),
            scalers=optimizer.scalers(),
            scheduler=scheduler.position(),
            random_state=random_state(),
        )

    @property
    def digest(self) -> str:
        """SHA-256, as hex, over all of them."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        """Returns the scalars as JSON."""
        document = {
            "progress": dataclasses.asdict(self.progress),
            "adam_step": self.adam_step,
            "scalers": list(self.scalers),
            "scheduler": dict(self.scheduler),
            "random_state": encode_random_state(dict(self.random_state)),
            "state": self.state,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, text: bytes) -> SlotScalars:
        """Returns the scalars that `encode` encoded."""
        document = json.loads(text)
        return cls(
            progress=Progress(**document["progress"]),
            adam_step=document["adam_step"],
            scalers=tuple(document["scalers"]),
            scheduler=document["scheduler"],
            random_state=decode_random_state(document["random_state"]),
            state=document["state"],
        )


def encode_entry(entry: LedgerEntry) -> bytes:
    """Returns a ledger entry as JSON, without the random state: that is each rank's own."""
    document = {
        field.name: getattr(entry, field.name)
        for field in dataclasses.fields(entry)
        if field.name != "random_state"
    }
    document["streams_alike"] = document.pop("rng_equal")  # as it is called in journals
    if entry.popularity is None:
        del document["popularity"]
    else:
        document["popularity"] = entry.popularity.document()
    document["groups"] = [dataclasses.asdict(group) for group in entry.groups]
    return json.dumps(document, separators=(",", ":")).encode()


def decode_entry(text: bytes) -> LedgerEntry:
    """Returns the ledger entry that `encode_entry` encoded."""
    document = json.loads(text)
    document["rng_equal"] = document.pop("streams_alike", False)
    if (popularity := document.get("popularity")) is not None:
        document["popularity"] = Popularity.of_document(popularity)
    document["groups"] = tuple(ParameterGroup(**group) for group in document["groups"])
    for name in ("found_inf", "scalers"):
        document[name] = tuple(document[name])
    return LedgerEntry(**document, random_state=None)


def same_scalars(one: LedgerEntry, other: LedgerEntry) -> bool:
    """Returns whether two entries speak of the same step with the same bits.

    What was found out about replicas besides is no part of the step.
    """
    other = dataclasses.replace(other, rng_equal=one.rng_equal)
    return encode_entry(one) == encode_entry(other)
