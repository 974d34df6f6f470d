# SPDX-License-Identifier: Apache-2.0
"""Introduction: what the ranks of a generation tell each other before anything is written.

It is one exchange: a recovery waits at each of them for the rank that comes last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.snapshots import LiveOperators
from megatron_moevement.policy.copies.loopback import Receiver, check_reachable
from megatron_moevement.policy.job.guarantee import Computation, Computations
from megatron_moevement.runtime.coordination.agreement import as_user_error, gather_read_together
from megatron_moevement.runtime.transport.interface import own_address, own_network
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.secret import SECRET_VARIABLE
from megatron_moevement.strategies.live_objects import LiveObjects
from megatron_moevement.strategies.moevement.protection.members import Member
from megatron_moevement.strategies.moevement.recovery.replicas import (
    Replicas,
    name_of_state,
    place_among,
)

_TOKEN_BYTES = 32
_SHOWN_DIGITS = 16
"""Of a digest of the key, for others to compare."""

KeyOffer = Sequence[str | None]
"""Digest of the key that a process has, and the key that it draws where it has none; as JSON."""


@dataclasses.dataclass(frozen=True)
class Introduction:
    """What all ranks told, in the order of ranks.

    Attributes:
        token: the key by which processes recognise each other.
        bases: of the newest plans of ranks; None on newcomers.
    """

    members: tuple[Member, ...]
    computations: Computations
    replicas: Replicas
    token: bytes
    bases: tuple[str | None, ...]


def introduce(
    settings: FaultTolerance,
    objects: LiveObjects,
    live: LiveOperators,
    own: Member,
    basis: str | None,
) -> Introduction:
    """Tells all other ranks of this one; every rank calls it, in step.

    Args:
        basis: of the newest plan of this process.

    Raises:
        UserError: on all ranks: an interface is none of its machine's, or others don't reach it,
            or processes have different secrets.
    """
    name = name_of_state(settings, objects, live)

    def tell() -> Sequence[Any]:
        address = own_address(settings.moevement_replication_interface)
        receiver = Receiver(objects.process, own_network(), address)
        return [
            own.document(),
            {**objects.computation.document(), "host": objects.host},
            name,
            dataclasses.asdict(receiver),
            offer_key(objects.replication_key),
            basis,
        ]

    told = _Told()
    with as_user_error():
        gather_read_together(tell, objects.device, told.read)
    check_reachable(tuple(told.receivers.values()))
    return Introduction(
        tuple(told.members),
        Computations(tuple(told.computations), tuple(told.hosts)),
        place_among(name, told.names),
        agree_on_key(objects.replication_key, tuple(told.offers)),
        tuple(told.bases),
    )


class _Told:
    """What ranks tell of themselves, read one by one; what they have in common is there once."""

    def __init__(self) -> None:
        """Nobody has told anything."""
        self.members: list[Member] = []
        self.computations: list[Computation] = []
        self.hosts: list[str] = []
        self.names: list[str | None] = []
        self.receivers: dict[tuple[str, str], Receiver] = {}  # the first at each address
        self.offers: dict[tuple[str | None, ...], None] = {}  # each once, by the first rank
        self.bases: list[str | None] = []
        self._sizes: dict[str, str] = {}
        self._computations: dict[str, Computation] = {}

    def read(self, _: int, told: Sequence[Any]) -> None:
        """Reads what the next rank tells."""
        member, computation, name, receiver, offer, basis = told
        sizes = self._sizes.setdefault(member["sizes"], member["sizes"])
        self.members.append(Member.of_document({**member, "sizes": sizes}))
        self.hosts.append(computation.pop("host"))
        self.computations.append(self._computation(computation))
        self.names.append(name)
        self.receivers.setdefault((receiver["network"], receiver["address"]), Receiver(**receiver))
        self.offers.setdefault(tuple(offer))
        self.bases.append(basis)

    def _computation(self, document: Mapping[str, Any]) -> Computation:
        """Returns what a rank computes with."""
        text = repr(document)
        if text not in self._computations:
            self._computations[text] = Computation.of_document(document)
        return self._computations[text]


def offer_key(key: bytes | None) -> KeyOffer:
    """Returns what a process offers: a key that is given never travels."""
    if key is None:
        return [None, secrets.token_hex(_TOKEN_BYTES)]
    return [hashlib.sha256(key).hexdigest()[:_SHOWN_DIGITS], None]


def agree_on_key(key: bytes | None, offers: Sequence[KeyOffer]) -> bytes:
    """Returns the key that all processes have: that they were given, or that rank 0 draws.

    Args:
        key: that this process was given; None where it was given none.
        offers: of all ranks.

    Raises:
        UserError: processes were given different ones.
    """
    if len({shown for shown, _ in offers}) > 1:
        raise UserError(f"processes have different secrets; give all the same {SECRET_VARIABLE}")
    drawn = offers[0][1]
    return key or bytes.fromhex(drawn or "")
