# SPDX-License-Identifier: Apache-2.0
"""Replicas: which ranks hold the same state, and a copy of it from one to another.

Without the distributed optimizer ranks that share data hold all of the state of what they train:
the non-expert part on all of them, experts on those that train the same ones. Where such a rank is
lost, what it held lies in the live tensors of the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch

from megatron_moevement.integrations.megatron.random_state import random_digest, random_state
from megatron_moevement.integrations.megatron.slot_layout import Part
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.job.state_recipe import Content
from megatron_moevement.runtime.coordination.commit_barrier import ReplicaRng
from megatron_moevement.runtime.peers.state_reader import StateReader, StateReadError
from megatron_moevement.runtime.slots.slot_record import EXTRAS
from megatron_moevement.runtime.transport.wire import MAX_DOCUMENT_BYTES
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.faults import FaultPoint
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.scalars import SlotScalars


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Where a rank stands among its replicas.

    Attributes:
        name: of what it holds, the same on its replicas; None where nothing is to be copied.
        group: number of their group.
    """

    name: str | None = None
    group: int = 0
    groups: int = 0

    def replica_rng(self) -> ReplicaRng | None:
        """Returns the present random streams, to be compared with those of the replicas."""
        if self.name is None:
            return None
        return ReplicaRng(self.group, self.groups, random_digest(random_state()))


def place_among(own: str | None, names: Sequence[str | None]) -> Replicas:
    """Returns the place of a rank among its replicas.

    Args:
        own: name of its state.
        names: of the states of all ranks.
    """
    groups = sorted({name for name in names if name is not None})
    if own is None or None in names or len(groups) == len(names):
        return Replicas()
    return Replicas(own, groups.index(own), len(groups))


def name_of_state(
    settings: FaultTolerance, objects: LiveObjects, live: LiveOperators
) -> str | None:
    """Returns what a rank holds: what every other rank holds the same of that says the same.

    Returns:
        None where nothing is to be copied.
    """
    if settings.moevement_no_replica_copy or not objects.optimizer.is_state_whole:
        return None
    place = f"pp{objects.rank.pp}.tp{objects.rank.tp}.cp{objects.rank.cp}"
    operators = [f"{one.id} {one.full_bytes} {one.compute_bytes}" for one in live.operators]
    digest = hashlib.sha256("\n".join(operators).encode()).hexdigest()
    return f"{place}.{digest[:16]}"


class StandingState:
    """The live state of a rank that stands still, for its replicas to copy."""

    def __init__(self, live: LiveOperators, scalars: SlotScalars) -> None:
        """Binds the live tensors.

        Args:
            live: this rank's operators, at S_k.
            scalars: what belongs to S_k besides tensors.
        """
        self._scalars = scalars
        self._parts = {part.name: part for part in _parts(live)}

    @property
    def names(self) -> tuple[str, ...]:
        """The operators' parts, by name."""
        return tuple(self._parts)

    def read(self, step: int, part: str, wanted: slice = slice(None)) -> tuple[memoryview, int]:
        """Returns bytes of a part of S_step, and how many it has; the server's threads call it.

        Raises:
            LookupError: the state is that of another step, or has no such part.
        """
        if step != self._scalars.progress.committed:
            raise LookupError(f"a state of step {self._scalars.progress.committed}, not {step}")
        if part == EXTRAS:
            extras = memoryview(self._scalars.encode())
            return extras[wanted], extras.nbytes
        return self._parts[part].read(wanted), self._parts[part].size_bytes


def copy_state(
    reader: StateReader, objects: LiveObjects, live: LiveOperators, step: int
) -> SlotScalars:
    """Fills the live tensors with S_step of a replica; compute weights are still to be derived.

    Args:
        reader: connected to the replica.

    Returns:
        What belongs to S_step besides tensors.

    Raises:
        StateReadError: the replica does not give it whole.
    """
    parts = {part.name: part for part in _parts(live)}
    sizes = {name: part.size_bytes for name, part in parts.items()}
    for name, payload in reader.take(step, sizes):
        part = parts[name]
        objects.faults.strike(step, FaultPoint.FETCH)
        if len(payload) != part.size_bytes:
            raise StateReadError(f"{name} has {len(payload)} bytes, not {part.size_bytes}")
        if payload:
            views = list(part.views(torch.frombuffer(payload, dtype=torch.uint8)))
            live.put_back(part.operator, part.content, views)
    ((_, extras),) = reader.take(step, {EXTRAS: MAX_DOCUMENT_BYTES})
    scalars = SlotScalars.decode(bytes(extras))
    live.set_step([part.operator for part in parts.values()], scalars.adam_step)
    objects.optimizer.set_group_steps(scalars.adam_step)
    return scalars


def _parts(live: LiveOperators) -> list[Part]:
    """Returns all of a rank's operators, each in a buffer of its own."""
    full = Content.FULL
    return [Part(one.id, full, 0, live.pieces(one.id, full)) for one in live.operators]
