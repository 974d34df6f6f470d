# SPDX-License-Identifier: Apache-2.0
"""The training program, which adds to each event `recovered` what its process loaded and served."""

import sys

from megatron_moevement.runtime.observation.events import EventLog, EventName
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.slot_messages import slot_of_document
from megatron_moevement.runtime.transport.wire import Kind
from megatron_moevement.strategies.moevement.recovery.rejoin import Laps
from megatron_moevement.strategies.moevement.recovery.replay import Slots
from megatron_moevement.training.program import main

loaded, slots, logged = [], [], []


def bytes_of(record):
    return sum(part.size_bytes for part in record.parts)


def count():
    begin, put_back, answer_to, emit = (
        Laps.__init__,
        Slots.put_back,
        ReplicaServer._answer_to,
        EventLog.emit,
    )

    def begin_anew(self, carried):
        for counted in (loaded, slots, logged):
            counted.clear()
        begin(self, carried)

    def load(self, slot, live):
        loaded.append(bytes_of(self.ring.held(self.window.step_of(slot))))
        return put_back(self, slot, live)

    def serve(self, channel, message, deadline):
        answer = answer_to(self, channel, message, deadline)
        if answer.kind is Kind.FOUND and answer.payload is not None:  # it was asked for bytes
            slots.append(bytes_of(slot_of_document(answer.document)[1]))
        elif answer.kind is Kind.LOGGED:
            logged.append(len(answer.payload))
        return answer

    def tell(self, event, iteration, **fields):
        if event is EventName.RECOVERED:
            fields |= {"loaded": sum(loaded), "slots": sum(slots), "logged": sum(logged)}
        emit(self, event, iteration, **fields)

    Laps.__init__, Slots.put_back = begin_anew, load
    ReplicaServer._answer_to, EventLog.emit = serve, tell


if __name__ == "__main__":
    count()
    sys.exit(main(sys.argv[1:]))
