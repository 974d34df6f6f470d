# SPDX-License-Identifier: Apache-2.0
"""The training program with bits that flip, named by its first arguments.

`--flip-sent=KIND:PROCESS:PLACE` changes one bit of the first payload of that kind that a process
sends: on the `wire`, or in `memory` before its proof is made. With `always` in front of the place
it is every payload. `--flip-logged=PROCESS:WHEN` changes one bit of what lies in the upstream log
of a process, when a peer is about to `fetch` it or before the `facts` of a recovery. `--flip-kept=
PROCESS:ROLE` changes one bit of each slot of the persisted window in its rings of that role, before
the facts of the first recovery.
"""

import sys

from megatron_moevement.runtime.stores.store import RingRole
from megatron_moevement.runtime.transport.wire import Channel, Kind
from megatron_moevement.runtime.upstream_log.log import UpstreamLog, tensor_bytes
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.program import main


def flipped(data):
    """Returns bytes of which one has another bit."""
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return memoryview(changed)


class FlippingWire:
    """A connection behind which one bit of the next bytes changes."""

    def __init__(self, plain):
        self._plain = plain
        self._left = 1

    def __getattr__(self, name):
        return getattr(self._plain, name)

    def send(self, data, deadline):
        if self._left:
            self._left -= 1
            data = flipped(data)
        self._plain.send(data, deadline)


def flip_sent(kind, place):
    send, done = Channel.send, []
    always, _, place = place.rpartition("-")

    def send_flipped(self, number, generation, document, payload, deadline, **rest):
        if number is not Kind[kind] or payload is None or (done and not always):
            return send(self, number, generation, document, payload, deadline, **rest)
        done.append(number)
        if place == "memory":
            return send(self, number, generation, document, flipped(payload), deadline, **rest)
        plain, halfway = self._connection, rest.get("halfway", lambda: None)

        def cross():
            halfway()
            self._connection = FlippingWire(plain)

        try:
            send(self, number, generation, document, payload, deadline, halfway=cross)
        finally:
            self._connection = plain

    Channel.send = send_flipped


def flip_logged(when):
    serve, extents, done = UpstreamLog.serve, UpstreamLog.extents, []

    def damage(log, tag):
        if not done:
            done.append(tag)
            tensor_bytes(log.sent(tag.step)[tag].data)[0] ^= 1

    def serve_damaged(self, tag):
        damage(self, tag)
        return serve(self, tag)

    def extents_damaged(self):
        if self.steps:
            damage(self, next(iter(self.sent(self.steps[-2]))))
        return extents(self)

    if when == "fetch":
        UpstreamLog.serve = serve_damaged
    else:
        UpstreamLog.extents = extents_damaged


def flip_kept(role):
    read, done = planning.read_left_state, []

    def read_damaged(store, host, generation):
        if generation and not done:
            window = store.open_journal().state.persisted
            for stored in store.rings():
                ring = store.open_ring(stored.role, stored.owner)
                for record in ring.records() if stored.role is RingRole(role) else ():
                    if record.window == window:
                        done.append(record)
                        ring.payload(record)[record.parts[0].offset] ^= 1
        return read(store, host, generation)

    planning.read_left_state = read_damaged


if __name__ == "__main__":
    kept = sys.argv[1:]
    me = str(Launch.from_environment().process)
    for argument in sys.argv[1:]:
        name, _, words = argument.partition("=")
        if name == "--flip-sent":
            kept.remove(argument)
            sort, process, where = words.split(":")
            if process == me:
                flip_sent(sort, where)
        elif name == "--flip-kept":
            kept.remove(argument)
            process, role = words.split(":")
            if process == me:
                from megatron_moevement.strategies.moevement.recovery import planning

                flip_kept(role)
        elif name == "--flip-logged":
            kept.remove(argument)
            process, where = words.split(":")
            if process == me:
                flip_logged(where)
    sys.exit(main(kept))
