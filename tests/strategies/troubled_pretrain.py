# SPDX-License-Identifier: Apache-2.0
"""The training program with trouble in what carries copies, named by its first arguments.

`--flip=PROCESS:STEP` changes one bit of the slot of a step in the memory of a process, once, when
its checksums are made and nothing of it is sent. `--unreachable=PROCESS:PEER:STEP` lets every copy
of the slot of that step or a later one break off on its way from a process to a peer.
`--rot=PROCESS:STEP` changes one bit of each copy of that step or a later one once a process has
checked and published it; checks in the background follow each other at once, as fast as they can.
"""

import os
import sys
from datetime import timedelta

from megatron_moevement.policy.watching.reading_pace import ReadingPace
from megatron_moevement.runtime.peers.connection import PeerConnection
from megatron_moevement.runtime.slots import background_check
from megatron_moevement.runtime.slots.ring_file import RingFile
from megatron_moevement.runtime.stores.store import RingRole
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.training.program import main


def flip(process, step):
    land, done = SlotReplicator.land, []

    def damage(self, record):
        ring: RingFile = self.ring
        if os.environ["RANK"] == str(process) and record.step == step and not done:
            done.append(record)
            ring.buffer(step)[record.payload_bytes // 2] ^= 1
        land(self, record)

    SlotReplicator.land = damage


def cut(process, peer, step):
    store = PeerConnection.store

    def break_off(self, owner, record, *rest, **how):
        if (self._me.process, self._process) == (process, peer) and record.step >= step:
            raise ConnectionResetError("the link is cut on purpose")
        store(self, owner, record, *rest, **how)

    PeerConnection.store = break_off


def rot(process, step):
    publish = RingFile.publish

    def damage(self, record):
        record = publish(self, record)
        is_copy = self.path.name.startswith(RingRole.HELD.value)
        if os.environ["RANK"] == str(process) and is_copy and record.step >= step:
            self.payload(record)[record.parts[0].offset] ^= 1
        return record

    RingFile.publish = damage
    background_check._BETWEEN_PASSES = timedelta(milliseconds=1)
    background_check.PACE = ReadingPace(cpu_share=1.0)


TROUBLES = {"--rot": rot, "--flip": flip, "--unreachable": cut}


if __name__ == "__main__":
    kept = sys.argv[1:]
    for argument in sys.argv[1:]:
        name, _, numbers = argument.partition("=")
        if name in TROUBLES:
            TROUBLES[name](*(int(number) for number in numbers.split(":")))
            kept.remove(argument)
    sys.exit(main(kept))
