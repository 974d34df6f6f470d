# SPDX-License-Identifier: Apache-2.0
"""What is buried ends in the background, and what is stuck keeps nothing else."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from megatron_moevement.runtime.interrupts.reaper import bury, count_stuck


def test_one_that_is_stuck_is_counted_and_keeps_no_other():
    released, ended = threading.Event(), []

    class Buried:
        def __init__(self, name):
            self.name = name

        def __del__(self):
            if self.name == "stuck":
                released.wait()
            ended.append(self.name)

    remains = [Buried("first"), Buried("stuck"), Buried("last")]
    bury(remains, timedelta(milliseconds=10))
    await_condition(lambda: len(ended) == 2)
    assert (sorted(ended), remains, count_stuck()) == (["first", "last"], [], 1)
    released.set()
    await_condition(lambda: count_stuck() == 0)
    assert ended[-1] == "stuck"


class Holds(torch.autograd.Function):
    """Keeps an object for the backward pass, as communication keeps its group."""

    @staticmethod
    def forward(ctx, tensor, kept):
        ctx.kept = kept
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Cut(torch.autograd.Function):
    """An interrupt comes here."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise InterruptedError


def test_what_an_interrupted_backward_pass_holds_is_dropped_by_us_all_the_same():
    droppers = []

    class Buried:
        def __del__(self):
            droppers.append(threading.current_thread().name)

    remains, tensor = [Buried(), Buried()], torch.ones(1, requires_grad=True)
    with pytest.raises(InterruptedError):
        (Holds.apply(tensor, remains[0]) + Cut.apply(tensor)).backward()
    bury(remains, timedelta(milliseconds=10))
    await_condition(lambda: droppers)
    time.sleep(0.1)
    assert (len(remains), count_stuck()) == (1, 0)
    (2 * tensor).backward()
    await_condition(lambda: len(droppers) == 2)
    assert threading.current_thread().name not in droppers


def await_condition(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
