# SPDX-License-Identifier: Apache-2.0
"""A rank's slots lie otherwise in its own ring than those that a holder has of it."""

import pytest

from megatron_moevement.runtime.peers import peer_threads
from megatron_moevement.runtime.slots.mapped_file import PAGE_BYTES
from megatron_moevement.runtime.slots.ring_file import RingShape
from megatron_moevement.runtime.stores.store import RingRole

from .conftest import DEADLINE, capture

PACKED = RingShape(7, 4 * PAGE_BYTES, 3, 16 * PAGE_BYTES, PAGE_BYTES)
SIZE_BYTES = 4 * PAGE_BYTES


@pytest.mark.parametrize("uncounted", [(), (3,)], ids=["from the start", "from the second slot"])
@pytest.mark.parametrize("least_part_bytes", [2**10, 2**30], ids=["in parts", "at once"])
def test_a_copy_that_is_counted_is_there_whatever_comes_after_it(
    job, monkeypatch, least_part_bytes, uncounted
):
    """All who had the slots were lost; the owner places them from the start of its ring."""
    monkeypatch.setattr(peer_threads, "LEAST_PART_BYTES", least_part_bytes)
    owner, holder = job(2, shape=PACKED)
    for step in (2, 3, 4, 5):  # four fill the ring
        before = capture(owner.ring, step, SIZE_BYTES)
        if step > 3:
            send(owner, holder, before)
    owner.ring = owner.store.create_ring(RingRole.OWN, owner.owner, PACKED)
    for step in uncounted:
        capture(owner.ring, step, SIZE_BYTES)
    with owner.sender(holder) as sender:
        for step in (4, 5):
            sender.landed(owner.owner, capture(owner.ring, step, SIZE_BYTES), (), (1,))
        for step in (6, 7):
            record = capture(owner.ring, step, SIZE_BYTES)
            assert step > 6 or record.extent in [one.extent for one in holder.held[0].records()]
            sender.land(owner.owner, record, owner.ring.payload(record), (1,))
            while sender.account.acknowledgements.owed_copies():
                assert sender.account.await_change(DEADLINE), sender.account.silent
            check_counted(owner, holder, sender.account.acknowledgements)


def send(owner, holder, record):
    with owner.sender(holder) as sender:
        payload = owner.ring.payload(record)
        assert sender.send(owner.owner, record, payload, (1,))[1].result() is None


def check_counted(owner, holder, acknowledgements):
    """Compares the copies that are relied on with the slots."""
    counted = [key.step for key, held in acknowledgements.held.items() if 1 in held]
    kept = holder.held[0]
    assert counted == [record.step for record in kept.records()]
    for step in counted:
        own, copy = owner.ring.held(step), kept.held(step)
        assert kept.payload(copy) == owner.ring.payload(own)
        assert kept.damaged_parts(copy) == ()
