# SPDX-License-Identifier: Apache-2.0
"""What becomes of the questions to a control store, also to one that is lost."""

import pickle
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
from nvidia_resiliency_ext.inprocess import monitor_process, wrap
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.sibling_monitor import SiblingMonitor
from nvidia_resiliency_ext.inprocess.state import State
from nvidia_resiliency_ext.inprocess.store import BarrierTimeout, StoreMixin

from megatron_moevement.cli.stores import serve_store
from megatron_moevement.integrations.nvrx.control_store import (
    ControlStore,
    GenerationStore,
    mend_generation_stores,
)
from megatron_moevement.integrations.nvrx.sealed_store import ForeignValueError, SealedStore
from megatron_moevement.settings.secret import Secret

SECRET = Secret(b"the secret of this job, and of no other")
LIMIT = timedelta(seconds=20)
LONG = timedelta(hours=1)
SHORT = timedelta(milliseconds=1)


def serve():
    """Returns what serves a control store here, and a connection to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return serve_store(listener, "127.0.0.1"), ControlStore("127.0.0.1", port, LIMIT, SECRET)


def ask_a_lost_store():
    import torch.distributed as dist  # noqa: PLC0415

    server, control = serve()
    store = GenerationStore(0, control)
    with pytest.raises(dist.DistStoreError):
        store.wait_for_interrupted(SHORT)
    del server
    store.wait_for_interrupted(LIMIT)
    store.lock_interruption_records()
    assert store.get_interruption_records() == []
    store.record_interrupted([InterruptionRecord(0, Interruption.EXCEPTION)])
    store.record_terminated_ranks([0])
    assert not store.is_rank_at_reentrant_barrier(0, store.ITERATION_BARRIER)
    for barrier in (store.iteration_barrier, store.completion_barrier):
        with pytest.raises(dist.DistNetworkError):
            barrier(ranks=[0], rendezvous_count=2, timeout=LIMIT)
    with pytest.raises(dist.DistNetworkError):
        store.wait_for_completed(LIMIT)


def ask_and_answer():
    server, control = serve()
    store = GenerationStore(3, control)
    record = InterruptionRecord(1, Interruption.SOFT_TIMEOUT)
    store.record_interrupted([record])
    store.wait_for_interrupted(LIMIT)
    store.lock_interruption_records()
    store.record_interrupted([InterruptionRecord(0, Interruption.EXCEPTION)])
    assert store.get_reasons() == {1: "SOFT_TIMEOUT"}
    store.record_terminated_ranks([1])
    assert store.get_terminated_ranks() == {1}
    assert not store.is_rank_at_reentrant_barrier(1, store.ITERATION_BARRIER)
    store.iteration_barrier(ranks=[1], rendezvous_count=2, timeout=timedelta(0))
    assert store.is_rank_at_reentrant_barrier(1, store.ITERATION_BARRIER)
    del server


def note_a_loss_after_others_have_read():
    server, control = serve()
    address = control.underlying_store.host, control.underlying_store.port
    first, monitor, last = (
        GenerationStore(1, ControlStore(*address, LIMIT, SECRET)) for _ in range(3)
    )
    monitor.record_interrupted([InterruptionRecord(2, Interruption.TERMINATED)])
    monitor.record_terminated_ranks([2])
    complete = f"{first.BARRIER_PREFIX}:{first.ITERATION_BARRIER}:complete"
    first.set(complete, "a stranger's")
    monitor.iteration_barrier(ranks=[2], rendezvous_count=3, timeout=LIMIT)
    ends = threading.Thread(
        target=first.iteration_barrier,
        kwargs={"ranks": [0], "rendezvous_count": 3, "timeout": LIMIT},
    )
    ends.start()
    last.iteration_barrier(ranks=[1], rendezvous_count=3, timeout=LIMIT)
    # Of a process that has left this generation, and died before its monitor has.
    monitor.record_terminated_ranks([1])
    ends.join()
    for store in (first, last):
        assert store.get_terminated_ranks() == {2}
        assert store.get_reasons() == {2: "TERMINATED"}
    assert GenerationStore(2, control).get_terminated_ranks() == set()
    del server


def wake_who_waits_for_the_end_at_once():
    server, control = serve()
    address = control.underlying_store.host, control.underlying_store.port
    first, last = (GenerationStore(1, ControlStore(*address, LIMIT, SECRET)) for _ in range(2))
    woken_s = []

    def wait():
        first._await(first._complete(first.ITERATION_BARRIER), LIMIT)
        woken_s.append(time.monotonic())

    waits = threading.Thread(target=wait)
    waits.start()
    time.sleep(0.5)
    start_s = time.monotonic()
    last.iteration_barrier(ranks=[0], rendezvous_count=1, timeout=LIMIT)
    waits.join()
    assert woken_s[0] < start_s + LIMIT.total_seconds() / 2
    del server


def leave_without_waiting():
    server, control = serve()
    store = GenerationStore(0, control)
    store.record_terminated_ranks([0])
    store.iteration_barrier(ranks=[0], rendezvous_count=2, timeout=LONG)
    assert store.is_rank_at_reentrant_barrier(0, store.ITERATION_BARRIER)
    with pytest.raises(BarrierTimeout):  # a monitor waits for others on behalf of the dead
        store.iteration_barrier(ranks=[0], rendezvous_count=2, timeout=SHORT, timeout_chunk=SHORT)
    del server


def give_up_a_process_that_wrote_nothing():
    server, control = serve()
    store = GenerationStore(1, control)
    monitor = SiblingMonitor(store, 0, 3, 3, timeout=LIMIT, interval=LIMIT)
    store.set_initial_rank(0, 4)
    monitor.terminate_unresponsive_ranks({1, 2})
    assert store.get_initial_ranks([0, 1]) == [4]
    assert store.get_terminated_ranks() == {1, 2}
    del server


def wait_until_interrupted():
    server, control = serve()
    store = GenerationStore(0, control)
    here = threading.main_thread().ident
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, signal.pthread_kill, [here, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        store.iteration_barrier(ranks=[0], rendezvous_count=2, timeout=LONG)
    del server


@pytest.mark.distributed
@pytest.mark.parametrize(
    "body", [leave_without_waiting, give_up_a_process_that_wrote_nothing, wait_until_interrupted]
)
def test_nobody_who_is_to_leave_waits_for_a_process_that_hangs(megatron_fork_server, body):
    megatron_fork_server.run(body, world_size=1, timeout_s=30).check()


@pytest.mark.distributed
def test_a_lost_store_interrupts_and_what_processes_agree_on_fails(megatron_fork_server):
    megatron_fork_server.run(ask_a_lost_store, world_size=1).check()


def meet_a_stranger():
    server, control = serve()
    store, other = GenerationStore(1, control), GenerationStore(2, control)
    store.set(store.ANY_RANK_COMPLETED, "")
    with pytest.raises(ForeignValueError, match="any_rank_completed what no process of this job"):
        store.wait_for_completed(timedelta(seconds=0.3))
    store.record_completed()
    store.wait_for_completed(LIMIT)
    # Neither another key nor another generation takes what was written.
    for key in (store.ANY_RANK_INTERRUPTED, store.INTERRUPTION_RECORDS_LOCK):
        store.set(key, store.get(store.ANY_RANK_COMPLETED))
        with pytest.raises(ForeignValueError):
            store.wait_for_interrupted(timedelta(seconds=0.3))
    other.record_interrupted([InterruptionRecord(0, Interruption.EXCEPTION)])
    store.set(store.ANY_RANK_INTERRUPTED, other.get(store.ANY_RANK_INTERRUPTED))
    with pytest.raises(ForeignValueError):
        store.wait_for_interrupted(timedelta(seconds=0.3))
    # What is in a list goes on counting, once.
    store.append(store.TERMINATED_RANKS, "7,")
    store.record_terminated_ranks([1])
    store.append(store.TERMINATED_RANKS, store.get(store.TERMINATED_RANKS).decode() + "x")
    assert store.get_terminated_ranks() == {1}
    store.completion_barrier(ranks=[0], rendezvous_count=2, timeout=timedelta(0))
    key = f"{store.BARRIER_PREFIX}:{store.COMPLETION_BARRIER}:arrived"
    store.append(key, store.get(key).decode())
    with pytest.raises(BarrierTimeout):
        store.completion_barrier(ranks=[1], rendezvous_count=3, timeout=SHORT)
    # A sign of life of an earlier moment is none.
    store.send_heartbeat(0)
    first = store.get(store.HEARTBEAT.format(rank=0))
    store.send_heartbeat(0)
    assert store.get_heartbeat(0) == 0
    for looks, old in enumerate((first, pickle.dumps(0.0), b"nan"), start=1):
        store.set(store.HEARTBEAT.format(rank=0), old)
        assert store.get_all_heartbeats(1) == [looks]
    store.send_heartbeat(0)
    assert store.get_all_heartbeats(2) == [0, 1]
    del server


def wait_for_what_a_stranger_overwrites():
    server, control = serve()
    address = control.underlying_store.host, control.underlying_store.port
    peer = ControlStore(*address, LIMIT, SECRET)
    control.send_state(State(rank=0, world_size=2), 0)
    control.set(control.STATE.format(rank=0), pickle.dumps(State(rank=0, world_size=2)))
    control.set(control.STATE.format(rank=1), b"x")
    later = threading.Timer(0.3, peer.send_state, [State(rank=1, world_size=2), 1])
    later.start()
    assert [state.rank for state in control.get_states(range(2))] == [0, 1]
    later.join()
    meets = threading.Timer(
        0.3, peer.initial_barrier, [], {"ranks": [1], "rendezvous_count": 2, "timeout": LIMIT}
    )
    emptied = threading.Timer(0.1, empty, [control])
    meets.start()
    emptied.start()
    control.initial_barrier(ranks=[0], rendezvous_count=2, timeout=LIMIT, timeout_chunk=SHORT)
    meets.join()
    emptied.join()
    stranger = ControlStore(*address, timedelta(seconds=1), Secret(b"x" * 32))
    stranger.send_key(["job"], 0)
    control._written.clear()
    control.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(ForeignValueError, match="key_0"):
        control.get_keys([0])
    del server


def empty(control):
    control.delete_key(f"{control.BARRIER_PREFIX}:{control.INITIAL_BARRIER}:arrived")


@pytest.mark.distributed
@pytest.mark.parametrize("body", [meet_a_stranger, wait_for_what_a_stranger_overwrites])
def test_what_no_process_of_the_job_wrote_does_not_count(megatron_fork_server, body):
    result = megatron_fork_server.run(body, world_size=1, timeout_s=40)
    result.check()
    assert "what no process of this job wrote: no seal" in result.ranks[0].stderr


def test_nothing_of_upstream_is_read_unsealed():
    upstream = {name for name, value in vars(StoreMixin).items() if not name.startswith("_")}
    unused = {"get_packed", "set_active_rank", "get_all_active_ranks", "critical_ranks"}
    methods = {name for name in upstream - unused if not name.isupper()}
    assert methods <= set(vars(SealedStore))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "body", [note_a_loss_after_others_have_read, wake_who_waits_for_the_end_at_once]
)
def test_all_processes_find_the_same_end_of_a_generation(megatron_fork_server, body):
    megatron_fork_server.run(body, world_size=1).check()


@pytest.mark.distributed
def test_what_a_generation_writes_it_reads(megatron_fork_server):
    megatron_fork_server.run(ask_and_answer, world_size=1).check()


def test_processes_and_their_monitors_ask_so():
    mend_generation_stores()
    assert wrap.PrefixStore is monitor_process.PrefixStore is GenerationStore
