"""Steps of a job that all ranks take or none: small collectives over data that needs no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class AgreementError(RuntimeError):
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
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(one) for one in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: payload.numel()] = payload.to(device)
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [
        json.loads(bytes(one[: int(size)].cpu().tolist()))
        for one, size in zip(gathered, lengths, strict=True)
    ]


def broadcast_json(value: Any, source: int, device: torch.device) -> Any:
    """Returns the JSON value of one rank on all of them; every rank calls it.

    Args:
        value: what `json` can write; of `source` alone.
        source: whose value counts.
        device: where the collective's tensors lie.
    """
    own = json.dumps(value).encode() if dist.get_rank() == source else b""
    length = torch.tensor([len(own)], dtype=torch.int64, device=device)
    dist.broadcast(length, source)
    text = torch.zeros(int(length), dtype=torch.uint8)
    if own:
        text.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    text = text.to(device)
    dist.broadcast(text, source)
    return json.loads(text.cpu().numpy().tobytes())


def together(action: Callable[[], T], device: torch.device) -> T:
    """Runs an action on every rank and returns its result where it succeeded on all of them.

    An action must not leave a collective halfway: what it raises on one rank it may raise before or
    after its collectives only.

    Raises:
        AgreementError: on every rank, if it raised an `Exception` on any rank.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  (reported to all ranks, below)
        failure = error
    reason = None if failure is None else (type(failure).__name__, str(failure))
    reasons = all_gather_json(reason, device)
    failed = next((rank for rank, one in enumerate(reasons) if one is not None), None)
    if failed is not None:
        raise AgreementError(failed, *reasons[failed]) from failure
    return result  # type: ignore[return-value]
