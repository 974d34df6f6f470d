# SPDX-License-Identifier: Apache-2.0
"""Kills, cuts, damage and silence in the middle of transfers."""

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_moevement.runtime.peers.sender import FetchError, SilentPeerError
from megatron_moevement.runtime.slots.ring_file import RingFile
from tests.harness.default_run import slow_but

from .conftest import DEADLINE, IDENTITY, LARGE_SHAPE, SHAPE, capture, key_of, rank_of

ROOT = Path(__file__).parents[3]


class Link:
    """A real proxy between a sender and a server, which cuts, damages or stops what it carries."""

    def __init__(self, address, *, cut_at=None, flip_at=None, stop_at=None):
        self._target = address
        self._cut_at, self._flip_at, self._stop_at = cut_at, flip_at, stop_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._sockets = [self._listener]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self):
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        target = socket.create_connection(self._target)
        self._sockets += [caller, target]
        back = threading.Thread(target=self._carry_back, args=(target, caller))
        self._threads.append(back)
        back.start()
        carried = 0
        try:
            while data := bytearray(caller.recv(4096)):
                for at in (self._cut_at, self._stop_at):
                    if at is not None and carried + len(data) > at:
                        target.sendall(data[: at - carried])
                        if self._stop_at is not None:
                            self._ended.wait()
                        return
                if self._flip_at is not None and 0 <= self._flip_at - carried < len(data):
                    data[self._flip_at - carried] ^= 1
                carried += len(data)
                target.sendall(data)
        except OSError:
            pass
        finally:
            self._hang_up()

    def _carry_back(self, target, caller):
        try:
            while data := target.recv(4096):
                caller.sendall(data)
        except OSError:
            pass
        if not self._ended.is_set() and self._stop_at is None:
            self._hang_up()

    def _hang_up(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._hang_up()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


def sent_over(owner, holder, record, deadline=DEADLINE, **trouble):
    """Sends a slot over a bad link; returns what became of it, and why the peer is silent."""
    with (
        Link(holder.server.address, **trouble) as link,
        owner.sender(deadline=deadline) as sender,
    ):
        sender.set_address(1, link.address)
        outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
        failure = outcome.exception(timeout=DEADLINE.total_seconds())
        assert sender.account.acknowledgements.owing == {}
        return failure, sender.account.silent.get(1)


def test_a_transfer_that_is_cut_anywhere_leaves_no_slot_or_a_whole_one(job):
    owner, holder = job(2)
    draw = random.Random(3)
    older, replaced = capture(owner.ring, 2), capture(owner.ring, 3)
    with owner.sender(holder) as sender:
        for each in (older, replaced):
            sender.send(owner.owner, each, owner.ring.payload(each), (1,))[1].result()
    record = capture(owner.ring, 3 + SHAPE.capacity)
    for cut_at in sorted(draw.randrange(4000) for _ in range(25)):
        failure, reason = sent_over(owner, holder, record, cut_at=cut_at)
        assert isinstance(failure, SilentPeerError) == (reason is not None)
        *_, newest = records = holder.held[0].records()
        assert records[0] == older
        assert newest in (older, replaced, record)
        assert [holder.held[0].damaged_parts(each) for each in records] == [()] * len(records)
        assert failure is not None or newest == record


def test_a_byte_that_changes_on_the_way_is_never_held(job):
    """Flips every 37th byte of what a sender says, the handshake included."""
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    failed = 0
    for flip_at in range(0, 4000, 37):
        holder.held[0].invalidate(3)
        failure, _ = sent_over(
            owner, holder, record, deadline=timedelta(milliseconds=300), flip_at=flip_at
        )
        held = holder.held[0].record(3)
        if held is not None:
            assert holder.held[0].damaged_parts(held) == ()
            assert held == record
        assert failure is not None or held is not None
        failed += failure is not None
    assert failed > 80


def test_damage_on_the_way_is_the_peers_not_the_slots(job):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    with Link(holder.server.address, flip_at=2500) as link, owner.sender() as sender:
        sender.set_address(1, link.address)
        outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
        assert isinstance(outcome.exception(), SilentPeerError)
        assert sender.account.damaged == frozenset()
        assert "hung up" in sender.account.silent[1] or "reset" in sender.account.silent[1]
    assert holder.held[0].records() == ()


@pytest.mark.parametrize("stop_at", [0, 300, 2500])
def test_who_does_not_acknowledge_in_time_is_silent(job, stop_at):
    owner, holder = job(2)
    record = capture(owner.ring, 3)
    began = time.monotonic()
    failure, reason = sent_over(
        owner, holder, record, deadline=timedelta(milliseconds=300), stop_at=stop_at
    )
    assert isinstance(failure, SilentPeerError)
    assert "timed out" in reason or "deadline" in reason
    assert 0.3 <= time.monotonic() - began < 5


def test_nobody_at_the_address_is_silent_at_once(job):
    (owner,) = job(1)
    record = capture(owner.ring, 3)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()[:2]
    with owner.sender() as sender:
        sender.set_address(1, address)
        sender.land(owner.owner, record, owner.ring.payload(record), (1,))
        assert sender.account.await_change(DEADLINE)
        assert "refused" in sender.account.silent[1]
        assert not sender.account.acknowledgements.is_complete(record.window)
        into = memoryview(bytearray(SHAPE.buffer_bytes))
        with pytest.raises(FetchError, match="refused"):
            sender.fetch(1, key_of(owner.owner, record), lambda _: into)


@pytest.mark.parametrize("closed", ["sender", "server"])
def test_closing_ends_a_transfer_that_is_stuck(job, closed):
    owner, holder = job(2, shape=LARGE_SHAPE)
    record = capture(owner.ring, 3, size_bytes=LARGE_SHAPE.buffer_bytes)
    with Link(holder.server.address, stop_at=100_000) as link, owner.sender() as sender:
        sender.set_address(1, link.address)
        outcomes = [
            sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1] for _ in range(3)
        ]
        began = time.monotonic()
        while 3 not in holder.held[0]._extents or holder.held[0].buffer(3)[50_000] == 0:
            assert time.monotonic() - began < 10
            time.sleep(0.01)
        began = time.monotonic()
        if closed == "sender":
            sender.close()
            assert all(outcome.cancelled() for outcome in outcomes)
            assert sender.account.silent == {}
        else:
            holder.server.close()
        assert time.monotonic() - began < 2
    assert holder.held[0].records() == ()


def test_closing_ends_a_call_that_nobody_answers(job):
    (owner,) = job(1)
    record = capture(owner.ring, 3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        with owner.sender() as sender:
            sender.set_address(1, mute.getsockname()[:2])
            outcome = sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1]
            time.sleep(0.05)
            began = time.monotonic()
        assert time.monotonic() - began < 2
        assert outcome.cancelled()


PEER = """
import sys, time
from pathlib import Path
from tests.runtime.replication.conftest import LARGE_SHAPE, Process, capture
root, role = Path(sys.argv[1]), sys.argv[2]
process = Process(root, int(sys.argv[3]), 2, shape=LARGE_SHAPE)
print(process.server.address[1], flush=True)
if role == "holder":
    time.sleep(60)
sender = process.sender()
sender.set_address(1, ("127.0.0.1", int(sys.stdin.readline())))
step = 0
while True:
    record = capture(process.ring, step, size_bytes=LARGE_SHAPE.buffer_bytes)
    outcome = sender.send(process.owner, record, process.ring.payload(record), (1,))[1]
    if outcome.exception() is not None:
        time.sleep(60)
    print(step, flush=True)
    step += 1
"""


def started(root, role, number):
    command = [sys.executable, "-c", PEER, str(root), role, str(number)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.distributed
@pytest.mark.parametrize("victim", slow_but((), ("holder", "owner")))
def test_whoever_is_killed_the_copies_are_whole(shared_memory, victim):
    draw = random.Random(7)
    path = shared_memory / "run-1" / "process-1" / f"held-{rank_of(0)}.ring"
    newest = []
    for _ in range(4):
        with (
            started(shared_memory, "holder", 1) as holder,
            started(shared_memory, "owner", 0) as owner,
        ):
            port = holder.stdout.readline()
            owner.stdout.readline()
            owner.stdin.write(port)
            owner.stdin.flush()
            assert owner.stdout.readline() == "0\n"
            time.sleep(draw.random() * 0.3)
            (holder if victim == "holder" else owner).send_signal(signal.SIGKILL)
            time.sleep(0.05)
            holder.kill()
            owner.kill()
        copies = RingFile.open(path, IDENTITY)
        for record in copies.records():
            pattern = f"{rank_of(0)} {record.step} layers.0.gate;".encode()
            assert copies.damaged_parts(record) == ()
            assert bytes(copies.payload(record)[: len(pattern)]) == pattern
            newest.append(record.step)
        copies.close()
    assert len(newest) >= 4
    assert max(newest) > 1


@pytest.mark.distributed
def test_a_stopped_holder_is_silent_and_its_successor_takes_over(shared_memory, job):
    owner, successor = job(2)
    with started(shared_memory, "holder", 2) as holder:
        port = int(holder.stdout.readline())
        holder.send_signal(signal.SIGSTOP)
        record = capture(owner.ring, 3)
        with owner.sender(successor, deadline=timedelta(milliseconds=300)) as sender:
            sender.set_address(2, ("127.0.0.1", port))
            sender.land(owner.owner, record, owner.ring.payload(record), (1, 2))
            while 2 not in sender.account.silent:
                assert sender.account.await_change(DEADLINE)
            (key,) = sender.account.acknowledgements.owing
            assert sender.account.acknowledgements.owing[key] <= {1, 2}
            sender.account.update(lambda known: known.holder_replaced(2, 1, [key]))
            sender.send(owner.owner, record, owner.ring.payload(record), (1,))[1].result()
            assert sender.account.acknowledgements.owing == {key: frozenset()}
        holder.kill()
