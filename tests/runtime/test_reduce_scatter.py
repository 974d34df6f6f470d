"""Who waits for a reduce-scatter can be interrupted, and gets the bits that gloo gives."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.runtime.fault_effects import raise_in_thread
from megatron_moevement.runtime.interruptible_wait import make_waits_interruptible
from megatron_moevement.runtime.reduce_scatter import reduce_scatter_in_python

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

LIMIT = timedelta(seconds=30)


class Interrupted(BaseException):
    """What a restart raises in the training thread."""


def scatter(outputs, inputs, op, coalesced):
    """Returns what is to be waited for."""
    if not coalesced:
        return [
            dist.reduce_scatter_tensor(output, own, op=op, async_op=True)
            for output, own in zip(outputs, inputs, strict=True)
        ]
    with dist._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        for output, own in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, own, op=op)
    return [manager]


def compare(coalesced):
    """Returns whether ours gives what gloo gives, for several types, shapes and operations."""
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            drawn = torch.Generator().manual_seed(rank)
            inputs = [
                (1000 * torch.randn(shape, generator=drawn)).to(dtype)
                for shape in ((size * 7,), (size * 2, 3, 5))
            ]
            cases.append((inputs, op))

    def outcomes():
        found = []
        for inputs, op in cases:
            own = [one.clone() for one in inputs]
            outputs = [torch.zeros_like(one[: len(one) // size]) for one in own]
            for work in scatter(outputs, own, op, coalesced):
                work.wait()
            assert all(map(torch.equal, own, inputs))
            found += outputs
        return found

    native = outcomes()
    reduce_scatter_in_python()
    ours = outcomes()
    assert all(output.any() for output in ours)
    return len(ours) == len(native) and all(map(torch.equal, ours, native))


@pytest.mark.parametrize("coalesced", [False, True])
def test_the_bits_are_those_of_gloo(fork_server, coalesced):
    results = fork_server.run(compare, world_size=3, args=[coalesced]).check()
    assert results.values == (True,) * 3


def interrupt_one(coalesced):
    """Interrupts rank 0, which waits for rank 1; that one comes afterwards."""
    dist.init_process_group("gloo")
    make_waits_interruptible()
    store = dist.distributed_c10d._get_default_store()
    own, output = torch.ones(2 * 3), torch.zeros(3)
    if dist.get_rank() == 1:
        store.wait(["interrupted"], LIMIT)
        for work in scatter([output], [own], dist.ReduceOp.SUM, coalesced):
            work.wait()
        store.set("done", "")
        return output.tolist()
    here = threading.main_thread().ident
    threading.Timer(0.3, raise_in_thread, [here, Interrupted]).start()
    (work,) = scatter([output], [own], dist.ReduceOp.SUM, coalesced)
    with pytest.raises(Interrupted):
        work.wait()
    store.set("interrupted", "")
    store.wait(["done"], LIMIT)
    time.sleep(0.1)
    return output.tolist()


@pytest.mark.parametrize("coalesced", [False, True])
def test_an_interrupt_reaches_who_waits_and_what_was_given_up_writes_nothing(
    fork_server, coalesced
):
    results = fork_server.run(interrupt_one, world_size=2, args=[coalesced], timeout_s=30).check()
    assert results.values == ([0.0] * 3, [2.0] * 3)
