"""What becomes of the questions to a control store, also to one that is lost."""

import signal
import socket
import threading
from datetime import timedelta

import pytest
from nvidia_resiliency_ext.inprocess import monitor_process, wrap
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import BarrierTimeout

from megatron_moevement.cli.launch import serve_store
from megatron_moevement.integrations.nvrx.stores import (
    ControlStore,
    GenerationStore,
    mend_generation_stores,
)

LIMIT = timedelta(seconds=20)
LONG = timedelta(hours=1)
SHORT = timedelta(milliseconds=1)


def serve():
    """Returns what serves a control store here, and a connection to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return serve_store(listener), ControlStore("127.0.0.1", port, LIMIT)


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


def ask_as_upstream():
    server, control = serve()
    store, upstream = GenerationStore(3, control), wrap.StoreMixin
    record = InterruptionRecord(1, Interruption.SOFT_TIMEOUT)
    upstream.record_interrupted(store, [record])
    store.wait_for_interrupted(LIMIT)
    store.lock_interruption_records()
    store.record_interrupted([InterruptionRecord(0, Interruption.EXCEPTION)])
    assert store.get_interruption_records() == [record]
    store.record_terminated_ranks([1])
    assert store.get_terminated_ranks() == {1}
    assert not store.is_rank_at_reentrant_barrier(1, store.ITERATION_BARRIER)
    store.iteration_barrier(ranks=[1], rendezvous_count=2, timeout=timedelta(0))
    assert store.is_rank_at_reentrant_barrier(1, store.ITERATION_BARRIER)
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
@pytest.mark.parametrize("body", [leave_without_waiting, wait_until_interrupted])
def test_nobody_who_is_to_leave_waits_for_a_process_that_hangs(megatron_fork_server, body):
    megatron_fork_server.run(body, world_size=1, timeout_s=30).check()


@pytest.mark.distributed
def test_a_lost_store_interrupts_and_what_processes_agree_on_fails(megatron_fork_server):
    megatron_fork_server.run(ask_a_lost_store, world_size=1).check()


@pytest.mark.distributed
def test_the_keys_of_a_generation_are_those_of_upstream(megatron_fork_server):
    megatron_fork_server.run(ask_as_upstream, world_size=1).check()


def test_processes_and_their_monitors_ask_so():
    mend_generation_stores()
    assert wrap.PrefixStore is monitor_process.PrefixStore is GenerationStore
