# SPDX-License-Identifier: Apache-2.0
"""The process group: torch's calls, each as an operation of a communicator.

What the host sees is that of `ProcessGroupNCCL` (torch 2.13):

- A call returns at once. Only who reads a result waits, in native code, for all that was asked for
  before (`Work.wait` here, since a tensor on a CPU can't be waited for).
- The first collective or batch of messages connects all members, a single message its two ranks.
- Calls within a group of calls run when the thread's last one is closed (`calls.py`).
- After an abort outputs are garbage (`abort.py`), and each further call raises an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed

from tests.harness.nccl_like import calls
from tests.harness.nccl_like.abort import Abort
from tests.harness.nccl_like.communicator import AbortedError, Communicator, Operation, Work

dist: Any = torch.distributed
"""Torch does not say all of its types."""
Tensors = Sequence[torch.Tensor]
_ALL = "all"


class Options:
    """Stands in for `ProcessGroupNCCL.Options`."""


class NcclLikeGroup(dist.ProcessGroup):  # type: ignore[misc]  # of a type that is not told
    """One process group of one process; made without a connection."""

    Options = Options
    device = torch.device("cpu")
    """Where its tensors are."""
    may_connect = True
    """Whether communicators of several ranks may still be made, in this process."""

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        """Connects nothing yet."""
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._communicators: dict[str, Communicator] = {}
        self._abort = Abort.from_environment()
        self._is_aborted = False
        self._batch: list[Operation] | None = None
        """Operations of the group of calls that is open on this process group."""

    # What torch asks of a group.

    def _get_backend(self, device: torch.device) -> NcclLikeGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: there is no check of sequences."""

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Returns the name that torch uses."""
        return "nccl"

    @property
    def _device_types(self) -> list[torch.device]:
        return [self.device]

    @property
    def supports_coalescing(self) -> bool:
        """Whether messages may be sent in a batch."""
        return True

    def abort(self) -> None:
        """Ends what runs; any thread calls it. Communicators that connect are not reached."""
        self._is_aborted = True
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def shutdown(self) -> None:
        """Closes the group: as an abort, torch's own does no less."""
        self.abort()

    # Groups of calls.

    def _group_start(self) -> None:
        calls.begin()

    def _group_end(self) -> None:
        calls.end()

    def _start_coalescing(self, device: torch.device) -> None:
        calls.begin()
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        batch, self._batch = self._batch or [], None
        if not batch:
            calls.end()
            return Work.nothing()
        communicator = self._communicator(_ALL, self._rank, self._size)
        works: list[Work] = []
        calls.defer(lambda: works.append(communicator.launch(batch)))
        calls.end()
        return works[0] if works else Work.nothing()

    # Messages.

    def send(self, tensors: Tensors, peer: int, tag: int) -> Work:
        """Sends a tensor to one rank."""
        return self._message(
            peer,
            lambda to: Operation(tensors, (), lambda gloo, own, _: [gloo.send(own, to, tag)]),
        )

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Work:
        """Receives a tensor from one rank."""
        return self._message(
            peer,
            lambda of: Operation((), tensors, lambda gloo, _, out: [gloo.recv(out, of, tag)]),
        )

    def _message(self, peer: int, operation: Callable[[int], Operation]) -> Work:
        self._check()
        if self._batch is not None:
            self._batch.append(operation(peer))
            return Work.nothing()
        low, high = sorted((self._rank, peer))
        communicator = self._communicator(f"{low}:{high}", int(self._rank == high), 2)
        return _launch(communicator, operation(int(peer == high)))

    # Collectives.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduces a tensor in place."""
        return self._collective(
            tensors, tensors, lambda gloo, _, out: [gloo.allreduce(out, _reducing(opts))]
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduces several tensors in place."""
        return self._collective(
            *(tensors, tensors),
            lambda gloo, _, out: [gloo.allreduce([each], _reducing(opts)) for each in out],
        )

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduces a tensor on one rank."""
        return self._collective(tensors, tensors, lambda gloo, _, out: [gloo.reduce(out, opts)])

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Sends a tensor of one rank to all."""
        return self._collective(tensors, tensors, lambda gloo, _, out: [gloo.broadcast(out, opts)])

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Gathers one tensor of each rank."""
        return self._collective(
            inputs, outputs[0], lambda gloo, own, out: [gloo.allgather([out], own)]
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Gathers one tensor of each rank on one of them."""
        return self._collective(
            *(inputs, list(chain(*outputs))),
            lambda gloo, own, out: [gloo.gather([out] if outputs else [], own, opts)],
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Sends each rank a tensor of one of them."""
        return self._collective(
            *(list(chain(*inputs)), outputs),
            lambda gloo, own, out: [gloo.scatter(out, [own] if inputs else [], opts)],
        )

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Work:
        """Gathers one tensor of each rank into one."""
        return self.all_gather_single_coalesced([output], [own])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Gathers several tensors of each rank, each into one."""
        return self._collective(
            *(inputs, outputs),
            lambda gloo, own, out: [
                gloo.allgather([list(into.view(-1).chunk(self._size))], [each.view(-1)])
                for into, each in zip(out, own, strict=True)
            ],
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduces tensors and leaves one of them on each rank; their sizes may differ."""
        return self._reduced(
            *(outputs, list(chain(*inputs)), opts),
            lambda own: [each[self._rank] for each in _split(own, [len(one) for one in inputs])],
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, own: torch.Tensor, opts: Any = None
    ) -> Work:
        """Reduces a tensor and leaves a part on each rank."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Reduces several tensors and leaves a part of each on each rank."""
        return self._reduced(
            *(outputs, inputs, opts),
            lambda own: [each.view(-1).chunk(self._size)[self._rank] for each in own],
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Sends a part of a tensor to each rank."""
        return self._collective(
            *([own], [output]),
            lambda gloo, ins, out: [
                gloo.alltoall_base(out[0], ins[0], list(output_sizes), list(input_sizes))
            ],
        )

    def barrier(self, opts: Any = None) -> Work:
        """Reduces one element: NCCL has no barrier of its own."""
        return self.allreduce([torch.zeros(1)])

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _reduced(
        self, outputs: Tensors, inputs: Tensors, opts: Any, own_parts: Callable[[Tensors], Tensors]
    ) -> Work:
        """Reduces copies of all inputs, which gloo can, and takes this rank's parts."""
        return self._collective(
            inputs,
            outputs,
            lambda gloo, own, out: [
                _Reduced(gloo, _reducing(opts), own, list(zip(out, own_parts(own), strict=True)))
            ],
        )

    def _collective(
        self,
        inputs: Tensors,
        outputs: Tensors,
        start: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], list[Any]],
    ) -> Work:
        self._check()
        operation = Operation(inputs, outputs, start)
        return _launch(self._communicator(_ALL, self._rank, self._size), operation)

    def _check(self) -> None:
        if self._is_aborted:
            raise AbortedError(str(self._rank))

    def _communicator(self, name: str, rank: int, size: int) -> Communicator:
        """Returns one of the group's communicators, which connects here where it is the first use.

        It connects at once: torch closes the groups of calls that are open around it.
        """
        if name not in self._communicators:
            late = f"communicator {name} of {size} ranks is made too late"
            assert self.may_connect, late
            store = dist.PrefixStore(name, self._store)
            with calls.closed():
                made = Communicator(store, rank, size, _patience(), self._abort)
            self._communicators[name] = made
        return self._communicators[name]


class _Reduced:
    """A reduction of copies by gloo, of which parts are the outputs; stands in for its work."""

    def __init__(
        self, gloo: Any, opts: Any, own: Tensors, parts: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._works = [gloo.allreduce([each], opts) for each in own]
        self._parts = parts

    def await_end(self, wait: Callable[[Any], object]) -> None:
        """Waits for gloo, and takes the parts."""
        for work in self._works:
            wait(work)
        for output, part in self._parts:
            output.view(-1).copy_(part.view(-1))


def _launch(communicator: Communicator, operation: Operation) -> Work:
    """Launches an operation now, or with the thread's last group of calls."""
    if calls.depth():
        calls.defer(functools.partial(communicator.launch, [operation]))
        return Work.nothing()
    return communicator.launch([operation])


def _reducing(opts: Any) -> Any:
    reducing = dist.AllreduceOptions()
    if opts is not None:
        reducing.reduceOp = opts.reduceOp
    return reducing


def _split(tensors: Tensors, sizes: Sequence[int]) -> list[Tensors]:
    found = iter(tensors)
    return [[next(found) for _ in range(size)] for size in sizes]


def _patience() -> timedelta | None:
    """Returns how long communicators may connect; None in NCCL's blocking mode: for ever."""
    if os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") != "1":
        return None
    return timedelta(seconds=int(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1800")))
