# SPDX-License-Identifier: Apache-2.0
"""Wrong places, for mutations: of slots in rings, and of copies in failure domains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron_moevement.policy.copies import placement
from megatron_moevement.policy.copies.placement import Host, Placement
from megatron_moevement.policy.copies.slot_ring import Extent, extent_of


def as_it_lay(
    step: int, size_bytes: int, lay: Extent | None, extents: Mapping[int, Extent], room_bytes: int
) -> Extent:
    """Places a slot out of another ring where it lay there, wherever its neighbours lie."""
    if lay is not None and lay.stop <= room_bytes:
        return lay
    return extent_of(step, size_bytes, extents, room_bytes)


def over_what_stays(
    copy: Extent, stay: Mapping[int, Extent], room_bytes: int
) -> tuple[Mapping[int, Extent], Extent]:
    """Places a copy where it lies in its owner's ring, over one that its owner relies on."""
    del room_bytes
    return stay, copy


def same_domain(hosts: list[Host], replicas: int, strictness: object = None) -> Placement:
    """Places copies as if each process were a failure domain of its own."""
    del strictness
    alone = [dataclasses.replace(host, domain=str(host.process)) for host in hosts]
    return placement.place_replicas(alone, replicas)
