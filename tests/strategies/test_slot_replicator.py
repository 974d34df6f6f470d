# SPDX-License-Identifier: Apache-2.0
"""Copies of a rank's slots: complete with the last acknowledgement; who is silent is replaced."""

import contextlib
import socket
import threading
from datetime import timedelta

import pytest

from megatron_moevement.policy.copies.persistence import SlotKey
from megatron_moevement.policy.copies.placement import Host, Placement
from megatron_moevement.policy.job.ranks import LogicalRank
from megatron_moevement.policy.window.schedule import Window
from megatron_moevement.runtime.peers.sender import SlotSender
from megatron_moevement.runtime.peers.server import ReplicaServer
from megatron_moevement.runtime.peers.stored_slots import StoredSlots
from megatron_moevement.runtime.slots.ring_file import RingFile, RingShape
from megatron_moevement.runtime.slots.slot_record import SlotPart, SlotRecord
from megatron_moevement.runtime.slots.store_identity import StoreIdentity
from megatron_moevement.runtime.transport.handshake import Session
from megatron_moevement.strategies.moevement.protection.slot_replicator import SlotReplicator
from megatron_moevement.strategies.strategy import CaptureLostError

pytestmark = pytest.mark.timeout(60)
TOKEN = b"a secret of this job"
DEADLINE = timedelta(seconds=20)
RANK = LogicalRank()
IDENTITY = StoreIdentity("run", "0123")
SIZE_BYTES = 60


def new_ring(folder, name):
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.ring"
    return RingFile.create(path, IDENTITY, RANK, RingShape.equal(5, 100, 1))


def capture(ring, step):
    payload = ring.reserve(step)[:SIZE_BYTES]
    payload[:] = bytes([step]) * SIZE_BYTES
    record = SlotRecord(
        0,
        Window(step - step % 2, 2),
        step % 2,
        step,
        SIZE_BYTES,
        (SlotPart.of("head", 0, payload),),
    )
    return ring.publish(record)


def await_complete(copies, window):
    while not copies.acknowledgements.is_complete(window):
        copies.await_change()


def await_complete_slot(copies, step):
    while any(copies.acknowledgements.owing[key] for key in copies.acknowledgements.owing):
        copies.await_change()


class Forwarder:
    """Listens at an address, and carries every connection to another one."""

    def __init__(self, address, target, broken=0):
        self._target, self._to_break, self.broken = target, broken, 0
        self._listener = socket.create_server(address)
        self.address = self._listener.getsockname()
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._run)]

    def _run(self):
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            if self.broken < self._to_break:
                self.broken += 1
                caller.close()
                continue
            target = socket.create_connection(self._target)
            self._sockets += [caller, target]
            for pair in ((caller, target), (target, caller)):
                self._threads.append(threading.Thread(target=self._carry, args=pair))
                self._threads[-1].start()

    @staticmethod
    def _carry(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

    def __enter__(self):
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@pytest.fixture
def holders(tmp_path):
    """Returns a function that starts a process that keeps copies: its server and its ring."""
    with contextlib.ExitStack() as stack:

        def start(process, *, room=True):
            ring = new_ring(tmp_path, f"held-{process}")
            stack.callback(ring.close)
            slots = StoredSlots(None)
            if room:
                slots.keep(ring)
            server = ReplicaServer(
                "127.0.0.1", Session(TOKEN, process, 1), slots, deadline=DEADLINE
            )
            return stack.enter_context(server), ring

        yield start


@pytest.fixture
def ring(tmp_path):
    made = new_ring(tmp_path, "own")
    yield made
    made.close()


@pytest.fixture
def copies_to(ring):
    """Returns a function that makes copies, first of all to processes 1 and 2, as they are told."""
    with contextlib.ExitStack() as stack:

        def make(addresses, first=(1, 2), halfway=lambda record: None, ping=lambda: None):
            sender = SlotSender(Session(TOKEN, 0, 1), addresses, deadline=DEADLINE, halfway=halfway)
            placement = Placement({RANK: first}, len(first), len(first))
            known = [Host(0, "own", RANK)]
            known += [Host(each, f"domain {each}") for each in addresses]
            made = SlotReplicator(sender, ring, placement, known, ping=ping)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def holder(holders):
    return holders(1)


@pytest.fixture
def copies(copies_to, holder, unused_tcp_port):
    """Copies to process 1 and to process 2, of which nothing is left; there is nobody else."""
    return copies_to({1: holder[0].address, 2: ("127.0.0.1", unused_tcp_port)})


@pytest.fixture
def unused_tcp_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_a_window_is_complete_without_a_holder_whose_place_nobody_can_take(copies, ring, holder):
    window = Window(0, 2)
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    assert copies.sent_bytes == 2 * 2 * SIZE_BYTES
    await_complete(copies, window)
    assert copies.acknowledgements.newest_complete() == window
    assert copies.acknowledgements.fewest_copies() == 1
    assert (copies.holders, copies.acknowledgements.excused) == ((1, 2), {2})
    assert [record.step for record in holder[1].records()] == [0, 1]


def test_one_copy_of_each_slot_is_waited_for_and_the_others_go_on(copies_to, ring, holder):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        owed = []
        copies = copies_to(
            {1: holder[0].address, 2: mute.getsockname()},
            ping=lambda: owed.append(copies.acknowledgements.owed_copies()),
        )
        copies.land(capture(ring, 0))
        copies.land(capture(ring, 1))
        copies.await_second_holder(Window(0, 2))
        assert owed == sorted(set(owed), reverse=True), "no copy came before a ping"
        assert [record.step for record in holder[1].records()] == [0, 1]
        assert copies.acknowledgements.owed_copies() == 2
        assert copies.holders == (1, 2)


def test_a_holder_that_failed_gets_all_that_it_lacks_in_order(copies_to, ring, holders, holder):
    """The first connections break, one in the handshake; then the holder is there."""
    with Forwarder(("127.0.0.1", 0), holder[0].address, broken=2) as link:
        copies = copies_to({1: link.address}, first=(1,))
        copies.land(capture(ring, 0))
        copies.land(capture(ring, 1))
        assert copies.acknowledgements.newest_complete() is None
        await_complete(copies, Window(0, 2))
    assert link.broken == 2
    assert copies.acknowledgements.fewest_copies() == 1
    assert [record.step for record in holder[1].records()] == [0, 1]


def test_without_any_copy_a_slot_is_not_complete_and_a_line_names_the_peer(
    copies_to, ring, unused_tcp_port, caplog
):
    copies = copies_to({2: ("127.0.0.1", unused_tcp_port)}, first=(2,))
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    while 2 not in copies.acknowledgements.excused:
        copies.await_change()
    for _ in range(8):
        copies.await_change()
    assert copies.acknowledgements.newest_complete() is None
    told = [
        record.message for record in caplog.records if "no process can replace" in record.message
    ]
    (line,) = told
    assert line.startswith("process 2 keeps no copies of pp0.dp0.tp0.cp0.ep0 now ([Errno 111]")


def test_a_holder_that_was_excused_gets_everything_once_it_answers(copies_to, ring, holders):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = bound.getsockname()
    copies = copies_to({2: address}, first=(2,))
    copies.land(capture(ring, 0))
    while 2 not in copies.acknowledgements.excused:
        copies.await_change()
    copies.land(capture(ring, 1))
    there, kept = holders(2)
    with Forwarder(address, there.address):
        await_complete(copies, Window(0, 2))
    assert copies.acknowledgements.excused == frozenset()
    assert [record.step for record in kept.records()] == [0, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_thread_that_sends_costs_no_copy(copies_to, ring, holder):
    struck = []

    def strike(record):
        if record.step == 1 and not struck:
            struck.append(threading.current_thread().name)
            raise RuntimeError("struck")

    copies = copies_to({1: holder[0].address}, first=(1,), halfway=strike)
    for step in range(4):
        copies.land(capture(ring, step))
    await_complete(copies, Window(2, 2))
    assert struck == ["slot-sender 1"]
    assert [record.step for record in holder[1].records()] == [0, 1, 2, 3]


def test_a_slot_that_was_dropped_is_not_sent_to_who_comes_back(copies_to, ring, holders, holder):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = bound.getsockname()
    copies = copies_to({1: holder[0].address, 2: address})
    for step in range(4):
        copies.land(capture(ring, step))
    await_complete(copies, Window(2, 2))
    copies.drop_before(Window(2, 2))
    assert {key.window for key in copies.acknowledgements.owing} == {Window(2, 2)}
    capture(ring, 5)  # in the buffer of the slot of step 0
    there, kept = holders(2)
    with Forwarder(address, there.address):
        while copies.acknowledgements.owed_copies():
            copies.await_change()
    assert copies.acknowledgements.fewest_copies() == 2
    assert [record.step for record in kept.records()] == [2, 3]


@pytest.mark.parametrize("dropped", [False, True])
def test_a_slot_that_is_damaged_in_its_own_ring_ends_the_wait(copies_to, ring, holder, dropped):
    copies = copies_to({1: holder[0].address}, first=(1,))
    copies.land(capture(ring, 0))
    await_complete_slot(copies, 0)
    record = capture(ring, 1)
    ring.buffer(1)[7] ^= 1
    if dropped:  # its buffer was given to another slot meanwhile
        copies.land_for([(record, [])])
        copies.drop_before(Window(2, 2))
        copies.mend()
        return
    copies.land(record)
    with pytest.raises(CaptureLostError, match=r"slot 1 of pp0.* of step 1, is damaged"):
        await_complete(copies, Window(0, 2))


def test_another_process_takes_the_place_of_a_silent_one_with_all_that_it_kept(
    copies_to, ring, holders
):
    (here, kept), (there, taken_over) = holders(1), holders(3)
    copies = copies_to({1: here.address, 3: there.address}, first=(1,))
    copies.land(capture(ring, 0))
    while any(copies.acknowledgements.owing.values()):
        copies.await_change()
    assert ([record.step for record in kept.records()], copies.holders) == ([0], (1,))
    here.close()
    copies.land(capture(ring, 1))
    await_complete(copies, Window(0, 2))
    assert copies.holders == (3,)
    assert [record.step for record in taken_over.records()] == [0, 1]
    assert [taken_over.damaged_parts(record) for record in taken_over.records()] == [(), ()]
    # Who shares slots knows only who was meant to have them.
    copies.land_for([(capture(ring, 2), [1])])
    copies.land(capture(ring, 3))
    await_complete(copies, Window(2, 2))
    assert [record.step for record in taken_over.records()] == [0, 1, 2, 3]


def test_all_that_holders_lack_is_accounted_for_before_any_of_it_is_sent(copies, ring, monkeypatch):
    accounted, send = [], SlotSender.send

    def noted(sender, *sent):
        accounted.append([key.step for key in sender.account.acknowledgements.owing])
        return send(sender, *sent)

    monkeypatch.setattr(SlotSender, "send", noted)
    copies.land_for((capture(ring, step), to) for step, to in ((2, [1]), (3, [])))
    assert accounted == [[2, 3], [2, 3]]
    assert [set(held) for held in copies.acknowledgements.held.values()] == [{2}, {1, 2}]


def test_who_has_no_room_for_what_it_is_to_take_over_is_passed_by(
    copies_to, ring, holders, unused_tcp_port
):
    (full, _), (there, taken_over) = holders(3, room=False), holders(4)
    copies = copies_to(
        {1: ("127.0.0.1", unused_tcp_port), 3: full.address, 4: there.address}, first=(1,)
    )
    copies.land(capture(ring, 0))
    copies.land(capture(ring, 1))
    await_complete(copies, Window(0, 2))
    assert copies.holders == (4,)
    assert [record.step for record in taken_over.records()] == [0, 1]


def test_a_slot_that_this_rank_has_lost_comes_back(copies, ring, holder):
    record = capture(ring, 3)
    copies.land_for([(record, [1])])
    while any(copies.acknowledgements.owing.values()):
        copies.await_change()
    payload = bytes(ring.payload(record))
    ring.buffer(3)[:SIZE_BYTES] = bytes(SIZE_BYTES)
    ring.invalidate(3)
    copies.fetch(1, SlotKey(RANK, record.window, record.slot), needed=())
    assert ring.record(3) == record
    assert bytes(ring.payload(record)) == payload
