# SPDX-License-Identifier: Apache-2.0
"""Copies to the host: whole before the sources change, failures told, never a hang."""

import threading
from datetime import timedelta

import pytest
import torch

from megatron_moevement.backends.cpu import HostCopyStream
from megatron_moevement.runtime.capture.capture import Capture, CaptureError, HostCopies
from megatron_moevement.runtime.slots import slot_record
from megatron_moevement.runtime.slots.mapped_file import checksum_of
from megatron_moevement.runtime.slots.slot_record import SlotPart
from tests.harness.late_stream import LateStream

pytestmark = pytest.mark.timeout(30)
TENSORS = 6
STEPS = 12


def no_wait(capture):
    """Goes on at once: what the training thread must not do."""
    del capture
    return timedelta()


def train(stream, await_copies):
    """Changes live tensors once per step; returns the steps whose snapshot is not the state."""
    live = [torch.zeros(50) for _ in range(TENSORS)]
    hosts = [[torch.full((50,), -1.0) for _ in live] for _ in range(STEPS)]
    with Capture(stream) as capture:
        for step in range(STEPS):
            for tensor in live:
                tensor.fill_(step)
            capture.begin([HostCopies(live, hosts[step])], lambda: None)
            await_copies(capture)
    return [
        step
        for step, host in enumerate(hosts)
        if not all(torch.equal(tensor, torch.full((50,), float(step))) for tensor in host)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_late_copies_in_any_order_are_through_before_the_sources_change(seed):
    stream = LateStream(seed)
    assert train(stream, Capture.await_copies) == []
    assert len(set(stream.orders)) > 1


def test_without_the_wait_snapshots_would_be_torn():
    assert train(LateStream(0), no_wait) != []


def test_the_wait_for_copies_is_told_and_does_not_include_what_follows_them():
    landing = threading.Event()
    with Capture(LateStream(0)) as capture:
        capture.begin([HostCopies([torch.ones(2)], [torch.zeros(2)])], landing.wait)
        assert capture.await_copies() >= timedelta(0)
        landing.set()
        capture.await_landed()


WAYS_TO_START = {
    "started": Capture.start,
    "copies awaited": Capture.await_copies,
    "landing awaited": Capture.await_landed,
    "closed": Capture.close,
    "another prepared": lambda capture: capture.prepare([], lambda: None),
    "another begun": lambda capture: capture.begin([], lambda: None),
}


@pytest.mark.parametrize("way", WAYS_TO_START)
def test_what_is_prepared_begins_where_it_is_started_or_waited_for(way):
    source, target, landed = torch.ones(2), torch.zeros(2), threading.Event()
    with Capture(HostCopyStream()) as capture:
        capture.prepare([HostCopies([source], [target])], landed.set)
        assert not landed.wait(0.1)
        assert not target.any()
        WAYS_TO_START[way](capture)
        assert landed.wait(10)
        assert torch.equal(target, source)


def test_what_is_started_twice_is_captured_once():
    landed = []
    with Capture(HostCopyStream()) as capture:
        capture.prepare([], lambda: landed.append(True))
        capture.start()
        capture.start()
        capture.await_landed()
    assert len(landed) == 1


class SlowStream(LateStream):
    """Takes 50 ms, from the moment on at which the training thread is about to wait."""

    def __init__(self):
        super().__init__(0, longest_wait_s=0.0, join_s=0.05)
        self.awaited = threading.Event()

    def join(self):
        self.awaited.wait()
        super().join()


def test_a_wait_for_copies_is_as_long_as_they_take():
    stream = SlowStream()
    with Capture(stream) as capture:
        capture.begin([HostCopies([torch.ones(2)], [torch.zeros(2)])], lambda: None)
        stream.awaited.set()
        assert capture.await_copies() >= timedelta(seconds=0.04)


def test_a_snapshot_lands_when_its_last_copy_is_through_and_one_after_the_other():
    hosts = [torch.zeros(3) for _ in range(4)]
    landed = []
    with Capture(LateStream(3)) as capture:
        for number, host in enumerate(hosts):
            copies = [
                HostCopies([torch.full((1,), 1.0 + number)], [host[place : place + 1]])
                for place in range(3)
            ]
            capture.begin(
                copies, lambda number=number, host=host: landed.append((number, host.tolist()))
            )
        capture.await_landed()
        assert landed == [(number, [1.0 + number] * 3) for number in range(4)]


def test_a_copy_into_another_type_is_the_cast():
    source = torch.tensor([1.0, 1.0 + 2**-9, float("inf"), -0.0])
    target = torch.zeros(4, dtype=torch.bfloat16)
    with Capture(HostCopyStream()) as capture:
        capture.begin([HostCopies([source], [target])], lambda: None)
        capture.await_copies()
    assert target.view(torch.int16).tolist() == source.bfloat16().view(torch.int16).tolist()


class BrokenStream(LateStream):
    def join(self):
        raise OSError("the device is gone")


def fail():
    raise OSError("the file system is gone")


@pytest.mark.parametrize(
    ("stream", "landed", "reason"),
    [(BrokenStream(0), lambda: None, "the device"), (LateStream(0), fail, "the file system")],
)
def test_a_failure_reaches_the_training_thread_and_every_later_call(stream, landed, reason):
    copy = HostCopies([torch.ones(2)], [torch.zeros(2)])
    with Capture(stream) as capture:
        capture.begin([copy], landed)
        with pytest.raises(CaptureError, match=reason):
            capture.await_landed()
        for later in (
            capture.check,
            capture.await_copies,
            lambda: capture.begin([copy], lambda: None),
        ):
            with pytest.raises(CaptureError, match=reason):
                later()


def test_a_failure_wakes_who_waits_already():
    broken = threading.Event()

    def fail_when_told():
        broken.wait()
        fail()

    with Capture(LateStream(0)) as capture:
        capture.begin([HostCopies([torch.ones(2)], [torch.zeros(2)])], fail_when_told)
        threading.Timer(0.05, broken.set).start()
        with pytest.raises(CaptureError, match="the file system"):
            capture.await_landed()


def test_closing_lets_what_was_begun_land():
    landed = []
    capture = Capture(LateStream(0))
    for number in range(5):
        copy = HostCopies([torch.ones(2)], [torch.zeros(2)])
        capture.begin([copy], lambda number=number: landed.append(number))
    capture.close()
    assert landed == list(range(5))


def test_closing_after_a_failure_returns_and_lands_nothing_more():
    landed = []
    capture = Capture(LateStream(0))
    started, go_on = threading.Event(), threading.Event()

    def fail_later():
        started.set()
        go_on.wait()
        fail()

    copy = HostCopies([torch.ones(2)], [torch.zeros(2)])
    capture.begin([copy], fail_later)
    started.wait()
    for _ in range(3):
        capture.begin([copy], lambda: landed.append(1))
    go_on.set()
    capture.close()
    assert landed == []
    with pytest.raises(CaptureError):
        capture.check()


def parts_of(stream, payload, places):
    """Returns the parts of a snapshot, made on the capture's thread, and which threads read it."""
    found, threads = [], set()

    def landed():
        found.extend(capture.parts_of(memoryview(payload), places))

    def checksum(data):
        threads.add(threading.current_thread().name)
        return checksum_of(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_record, "checksum_of", checksum)
        with Capture(stream) as capture:
            capture.begin([], landed)
            capture.await_landed()
    return found, threads


@pytest.mark.parametrize("stream", [HostCopyStream(), LateStream(0)], ids=["one", "more"])
def test_parts_have_the_checksums_of_their_bytes_whatever_reads_them(stream):
    payload = bytes(range(250))
    places = {"a": slice(0, 10), "b": slice(10, 10), "c": slice(64, 200), "d": slice(200, 250)}
    found, threads = parts_of(stream, payload, places)
    assert found == [
        SlotPart.of(name, place.start, memoryview(payload)[place]) for name, place in places.items()
    ]
    is_alone = stream.checksum_threads == 1
    assert all((name == "capture") is is_alone for name in threads)


def test_parts_are_read_by_as_many_threads_as_a_device_leaves_cores(monkeypatch):
    stream = LateStream(0)
    together = threading.Barrier(stream.checksum_threads, timeout=10)
    monkeypatch.setattr(slot_record, "checksum_of", lambda data: together.wait() and len(data))
    places = {str(number): slice(number, number + 1) for number in range(4)}
    with Capture(stream) as capture:
        capture.begin([], lambda: capture.parts_of(memoryview(bytes(4)), places))
        capture.await_landed()
    assert not any(thread.name.startswith("checksums") for thread in threading.enumerate())


def test_a_part_that_can_not_be_read_fails_the_snapshot(monkeypatch):
    monkeypatch.setattr(slot_record, "checksum_of", lambda data: 1 // 0)
    with Capture(LateStream(0)) as capture:
        capture.begin([], lambda: capture.parts_of(memoryview(bytes(4)), {"a": slice(0, 4)}))
        with pytest.raises(CaptureError, match="division"):
            capture.await_landed()
