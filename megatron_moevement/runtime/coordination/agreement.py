# SPDX-License-Identifier: Apache-2.0
"""Steps of a job that all ranks take or none: small collectives over data that needs no pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_moevement.errors import MoEvementError, UserError
from megatron_moevement.runtime.interrupts.host_wait import await_on_host

T = TypeVar("T")

_LENGTH_BYTES = 8
_INLINE_BYTES = 4096
"""What goes with the lengths, so that values that are no longer take one collective."""
_INLINE_BYTES_OF_ALL = 1 << 20
"""The most of it on one rank, which receives that of all."""


class AgreementError(MoEvementError, RuntimeError):
    """An action failed on at least one rank; every rank raises it, with the first rank's reason.

    Attributes:
        reason: what that rank's exception says, in one line.
    """

    def __init__(self, rank: int, kind: str, text: str) -> None:
        self.reason = " ".join(text.split()) or kind
        super().__init__(f"rank {rank}: {kind}: {self.reason}")


def all_gather_json(
    value: Any, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Returns the JSON values of all ranks, in the order of ranks; every rank calls it.

    Args:
        value: what `json` can write.
        device: where the collective's tensors lie (the host with gloo, the GPU with NCCL).
        group: whose ranks; None: the whole job's.
    """
    payloads = _gather_payloads(value, device, group)
    values: list[Any] = json.loads(b"[%b]" % b",".join(payloads))  # names of fields are there once
    return values


def gather_read(value: Any, device: torch.device, read: Callable[[int, Any], T]) -> list[T]:
    """Returns what each rank's JSON value is read as, in the order of ranks; every rank calls it.

    Of the values themselves there is one at a time: where ranks tell much, what they told takes
    more memory, and more of the garbage collector's time, than what is made of it.

    Args:
        value: what `json` can write.
        read: is called with each rank and its value.
    """
    payloads = _gather_payloads(value, device, None)
    return [read(rank, json.loads(payload)) for rank, payload in enumerate(payloads)]


def _gather_payloads(
    value: Any, device: torch.device, group: dist.ProcessGroup | None
) -> Iterator[bytes]:
    """Returns the JSON texts of all ranks, one after the other; the collectives are over."""
    payload = json.dumps(value).encode()
    inline = min(_INLINE_BYTES, _INLINE_BYTES_OF_ALL // dist.get_world_size(group))
    size = _LENGTH_BYTES + inline
    gathered = _all_gather(_head(payload, inline), size, device, group)
    begins = range(0, len(gathered), size)
    lengths = [max(_length(gathered[begin:]) - inline, 0) for begin in begins]
    rests = memoryview(b"")
    if any(lengths):  # on all ranks alike
        rests = _all_rests(payload[inline:], lengths, device, group)
    return (
        _payload(gathered[begin : begin + size], rests[end - length : end])
        for begin, length, end in zip(begins, lengths, accumulate(lengths), strict=True)
    )


def _head(payload: bytes, inline: int = _INLINE_BYTES) -> bytes:
    """Returns what is sent first: the length of a payload, and its beginning."""
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:inline]


def _length(head: memoryview) -> int:
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def _payload(head: memoryview, rest: memoryview) -> bytes:
    """Returns a payload, from what was sent first and what came after it."""
    return b"".join((head[_LENGTH_BYTES : _LENGTH_BYTES + _length(head)], rest))


def _all_gather(
    own: bytes, size: int, device: torch.device, group: dist.ProcessGroup | None
) -> memoryview:
    """Returns the bytes of all ranks, each filled up to a size."""
    filled = _filled(own, size, device)
    gathered = filled.new_empty(size * dist.get_world_size(group))
    await_on_host(dist.all_gather_single(gathered, filled, group=group, async_op=True))
    return _read(gathered)


def _all_rests(
    own: bytes, lengths: Sequence[int], device: torch.device, group: dist.ProcessGroup | None
) -> memoryview:
    """Returns the bytes of all ranks: a reduction takes them as they are, however unlike in length.

    To fill up what all others send to the longest would take the square of the ranks where one
    speaks for many.
    """
    begin = sum(lengths[: dist.get_rank(group)])
    rests = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
    if own:
        rests[begin : begin + len(own)] = _filled(own, len(own), device)
    await_on_host(dist.all_reduce(rests, group=group, async_op=True))
    return _read(rests)


def gather_unlike(digest: str, device: torch.device) -> list[str]:
    """Returns the digests of all ranks where they differ, and none where all are the same.

    Args:
        digest: as hex, of the same length on all ranks.
    """
    own = torch.frombuffer(bytearray(bytes.fromhex(digest)), dtype=torch.uint8)
    largest = torch.stack((own, 255 - own)).to(device)
    await_on_host(dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True))
    most, least = largest.cpu()
    return [] if torch.equal(most, 255 - least) else all_gather_json(digest, device)


def gather_distinct(value: Any, device: torch.device) -> list[Any]:
    """Returns the different JSON values of the ranks, by the first rank of each; all call it.

    A value that all have alike may be long: it travels once.

    Args:
        value: what `json` can write.
    """
    own = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    digests = all_gather_json(own, device)
    return [broadcast_json(value, digests.index(each), device) for each in dict.fromkeys(digests)]


def broadcast_json(value: Any, source: int, device: torch.device) -> Any:
    """Returns the JSON value of one rank on all of them; every rank calls it.

    Args:
        value: what `json` can write; of `source` alone.
    """
    payload = json.dumps(value).encode() if dist.get_rank() == source else b""
    head = _broadcast(_head(payload), _LENGTH_BYTES + _INLINE_BYTES, source, device)
    longer = _length(head) - _INLINE_BYTES
    rest = memoryview(b"")
    if longer > 0:  # on all ranks alike
        rest = _broadcast(payload[_INLINE_BYTES:], longer, source, device)
    return json.loads(_payload(head, rest))


def _broadcast(own: bytes, size: int, source: int, device: torch.device) -> memoryview:
    """Returns the bytes of one rank, filled up to a size."""
    filled = _filled(own, size, device)
    await_on_host(dist.broadcast(filled, source, async_op=True))
    return _read(filled)


def _read(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor, which come from a device in one copy."""
    return tensor.cpu().numpy().data


def _filled(own: bytes, size: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8).to(device)


def gather_together(action: Callable[[], Any], device: torch.device) -> list[Any]:
    """Runs an action on every rank and returns the JSON values that all of them return.

    An action must not leave a collective halfway: what it raises on one rank it may raise before or
    after its collectives only.

    Raises:
        AgreementError: on every rank, if it raised an `Exception` on any rank.
    """
    own, failure = _outcome(action)
    told = all_gather_json(own, device)
    return [_value(rank, outcome, failure) for rank, outcome in enumerate(told)]


def gather_read_together(
    action: Callable[[], Any], device: torch.device, read: Callable[[int, Any], T]
) -> list[T]:
    """Runs an action on every rank and returns what their JSON values are read as.

    Args:
        read: as of `gather_read`; it may be called although a later rank has failed.

    Raises as `gather_together` does.
    """
    own, failure = _outcome(action)
    return gather_read(
        own, device, lambda rank, outcome: read(rank, _value(rank, outcome, failure))
    )


def _outcome(action: Callable[[], Any]) -> tuple[list[Any], Exception | None]:
    """Returns what an action came to, as all ranks are told, and what it raised."""
    try:
        return [action(), None], None
    except Exception as error:  # noqa: BLE001  (reported to all ranks)
        return [None, [type(error).__name__, str(error)]], error


def _value(rank: int, outcome: Sequence[Any], failure: Exception | None) -> Any:
    """Returns what the action of a rank has returned.

    Args:
        failure: what it raised on this one.

    Raises:
        AgreementError: it raised something.
    """
    value, reason = outcome
    if reason is not None:
        raise AgreementError(rank, *reason) from failure
    return value


def together(action: Callable[[], T], device: torch.device) -> T:
    """Runs an action on every rank and returns its result where it succeeded on all of them.

    Raises as `gather_together` does; the results stay with their ranks.
    """
    results: list[T] = []
    gather_together(lambda: results.append(action()), device)
    return results[0]


def on_first_rank(action: Callable[[], object], device: torch.device) -> None:
    """Runs an action on rank 0 alone; every rank calls it.

    Raises:
        AgreementError: on every rank, if it raised an `Exception`.
    """
    together(lambda: action() if dist.get_rank() == 0 else None, device)


@contextlib.contextmanager
def as_user_error(before: str = "", after: str = "") -> Iterator[None]:
    """Raises what ranks could not do together as a UserError, with words around its reason."""
    try:
        yield
    except AgreementError as error:
        raise UserError(f"{before}{error.reason}{after}") from error
