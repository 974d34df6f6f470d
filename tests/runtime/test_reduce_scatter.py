# SPDX-License-Identifier: Apache-2.0
"""Who waits for a reduce-scatter can be interrupted, and gets the bits that gloo gives."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_moevement.runtime.interrupts.interruptible_wait import make_waits_interruptible
from megatron_moevement.runtime.interrupts.reduce_scatter import reduce_scatter_in_python
from megatron_moevement.runtime.interrupts.thread_start import raise_in_thread
from tests.harness.interrupted import Interrupted

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

LIMIT = timedelta(seconds=30)


def scatter(outputs, inputs, op, form):
    """Returns what is to be waited for."""
    if form == "coalesced":
        with dist._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
            for output, own in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_tensor(output, own, op=op)
        return [manager]
    works = []
    for output, own in zip(outputs, inputs, strict=True):
        if form == "single":
            works.append(dist.reduce_scatter_tensor(output, own, op=op, async_op=True))
        else:
            parts = list(own.split(shares(own, form)))
            works.append(dist.reduce_scatter(output, parts, op=op, async_op=True))
    return works


def shares(own, form):
    """Returns how many rows of an input each rank gets; of uneven parts one is empty."""
    even = len(own) // dist.get_world_size()
    rows = [even] * dist.get_world_size()
    if form == "uneven":
        rows[0], rows[-1] = 0, 2 * even
    return rows


def compare(form):
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
            outputs = [torch.zeros_like(one[: shares(one, form)[rank]]) for one in own]
            for work in scatter(outputs, own, op, form):
                work.wait()
            assert all(map(torch.equal, own, inputs))
            found += outputs
        return found

    native = outcomes()
    reduce_scatter_in_python()
    ours = outcomes()
    assert all(output.any() == bool(output.numel()) for output in ours)
    return len(ours) == len(native) and all(map(torch.equal, ours, native))


@pytest.mark.parametrize("form", ["single", "coalesced", "even", "uneven"])
def test_the_bits_are_those_of_gloo(fork_server, form):
    results = fork_server.run(compare, world_size=3, args=[form]).check()
    assert results.values == (True,) * 3


def interrupt_one(form):
    """Interrupts rank 0, which waits for rank 1; that one comes afterwards."""
    dist.init_process_group("gloo")
    make_waits_interruptible()
    store = dist.distributed_c10d._get_default_store()
    own, output = torch.ones(2 * 3), torch.zeros(3)
    if dist.get_rank() == 1:
        store.wait(["interrupted"], LIMIT)
        for work in scatter([output], [own], dist.ReduceOp.SUM, form):
            work.wait()
        store.set("done", "")
        return output.tolist()
    here = threading.main_thread().ident
    threading.Timer(0.3, raise_in_thread, [here, Interrupted]).start()
    (work,) = scatter([output], [own], dist.ReduceOp.SUM, form)
    with pytest.raises(Interrupted):
        work.wait()
    store.set("interrupted", "")
    store.wait(["done"], LIMIT)
    time.sleep(0.1)
    return output.tolist()


@pytest.mark.parametrize("form", ["single", "coalesced", "even"])
def test_an_interrupt_reaches_who_waits_and_what_was_given_up_writes_nothing(fork_server, form):
    results = fork_server.run(interrupt_one, world_size=2, args=[form], timeout_s=30).check()
    assert results.values == ([0.0] * 3, [2.0] * 3)
