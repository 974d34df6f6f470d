# SPDX-License-Identifier: Apache-2.0
"""Slot transfers of a recovery: what this rank's ring lacks is fetched, what holders lack is sent.

The plan says all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.recovery.plan import RankPlan, SlotFetch, SlotSend
from megatron_moevement.policy.recovery.slot_choice import fetches_in_order, held_steps
from megatron_moevement.runtime.peers.sender import FetchError
from megatron_moevement.runtime.slots.slot_record import SlotRecord
from megatron_moevement.strategies.moevement.protection.host_memory import HostMemory

logger = logging.getLogger(__name__)


def fetch_slots(memory: HostMemory, own: RankPlan) -> None:
    """Gets slots into this rank's ring; its training thread calls it.

    A process that was a spare may have one in the ring of copies that it kept for the rank. What
    else lies in the ring is of no account: the plan names all that is needed.

    Raises:
        FetchError: no source of a slot gives it intact and in time.
    """
    held = held_steps(own, memory.host.process, lambda key: _record(memory, key) is not None)
    for fetch in fetches_in_order(own, held):
        _fetch(memory, fetch, held)
        held.add(fetch.slot.step)


def send_slots(memory: HostMemory, sends: Iterable[SlotSend]) -> None:
    """Sends slots of this rank's ring in the background; its training thread calls it."""
    memory.copies.land_for((memory.own_ring.held(send.slot.step), send.to) for send in sends)


def _fetch(memory: HostMemory, fetch: SlotFetch, needed: Container[int]) -> None:
    """Gets a slot from the first of its sources that gives it whole."""
    for source in fetch.sources:
        try:
            memory.copies.fetch(source, fetch.slot, needed)
            return
        except FetchError as error:
            if source == fetch.sources[-1]:
                raise
            logger.warning("%s; another process has it, too", error)


def _record(memory: HostMemory, key: SlotKey) -> SlotRecord | None:
    """Returns what the ring says of a slot, None when it holds another one."""
    record = memory.own_ring.record(key.step)
    if record is None or (record.window, record.slot) != (key.window, key.slot):
        return None
    return record
