"""Steps of a job that all ranks take or none: small collectives over data that needs no pickle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_moevement.errors import MoEvementError, UserError

T = TypeVar("T")

_LENGTH_BYTES = 8
_INLINE_BYTES = 4096
"""What goes with the lengths, so that values that are no longer take one collective."""


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
    payload = json.dumps(value).encode()
    head = _head(payload)
    heads = _all_gather(head, _LENGTH_BYTES + _INLINE_BYTES, device, group)
    lengths = [_length(each) for each in heads]
    longest_rest = max(lengths) - _INLINE_BYTES
    rests = [b""] * len(heads)
    if longest_rest > 0:  # on all ranks alike
        rests = _all_gather(payload[_INLINE_BYTES:], longest_rest, device, group)
    return [_value(head, rest) for head, rest in zip(heads, rests, strict=True)]


def _head(payload: bytes) -> bytes:
    """Returns what is sent first: the length of a payload, and its beginning."""
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_INLINE_BYTES]


def _length(head: bytes) -> int:
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def _value(head: bytes, rest: bytes) -> Any:
    """Returns the JSON value of a payload, from what was sent first and what came after it."""
    return json.loads((head[_LENGTH_BYTES:] + rest)[: _length(head)])


def _all_gather(
    own: bytes, size: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[bytes]:
    """Returns the bytes of all ranks, each filled up to a size."""
    filled = _filled(own, size, device)
    gathered = [torch.empty_like(filled) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, filled, group=group)
    return [one.cpu().numpy().tobytes() for one in gathered]


def broadcast_json(value: Any, source: int, device: torch.device) -> Any:
    """Returns the JSON value of one rank on all of them; every rank calls it.

    Args:
        value: what `json` can write; of `source` alone.
    """
    payload = json.dumps(value).encode() if dist.get_rank() == source else b""
    head = _broadcast(_head(payload), _LENGTH_BYTES + _INLINE_BYTES, source, device)
    longer = _length(head) - _INLINE_BYTES
    rest = b""
    if longer > 0:  # on all ranks alike
        rest = _broadcast(payload[_INLINE_BYTES:], longer, source, device)
    return _value(head, rest)


def _broadcast(own: bytes, size: int, source: int, device: torch.device) -> bytes:
    """Returns the bytes of one rank, filled up to a size."""
    filled = _filled(own, size, device)
    dist.broadcast(filled, source)
    return filled.cpu().numpy().tobytes()


def _filled(own: bytes, size: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8).to(device)


def gather_together(action: Callable[[], Any], device: torch.device) -> list[Any]:
    """Runs an action on every rank and returns the JSON values that all of them return.

    An action must not leave a collective halfway: what it raises on one rank it may raise before or
    after its collectives only.

    Raises:
        AgreementError: on every rank, if it raised an `Exception` on any rank.
    """
    failure: Exception | None = None
    own: list[Any] = [None, None]
    try:
        own = [action(), None]
    except Exception as error:  # noqa: BLE001  (reported to all ranks, below)
        failure = error
        own = [None, [type(error).__name__, str(error)]]
    told = all_gather_json(own, device)
    for rank, (_, reason) in enumerate(told):
        if reason is not None:
            raise AgreementError(rank, *reason) from failure
    return [value for value, _ in told]


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
