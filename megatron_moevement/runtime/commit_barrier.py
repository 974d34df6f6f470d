"""The one point of a step after which every rank may apply it.

No rank applies step k before every rank has finished the backward pass and all gradient reductions
of step k. Megatron gives no such point, so one tiny reduction over the whole job is made per step
and read on the host. It also carries what everybody must learn at the same step.
"""

from __future__ import annotations

import dataclasses
import struct
from enum import IntEnum

import torch
import torch.distributed as dist


class StopRequest(IntEnum):
    """Why a rank wants the job to end after this step; the greatest wins."""

    NONE = 0
    DURATION = 1
    SIGNAL = 2


@dataclasses.dataclass(frozen=True)
class Vote:
    """What one rank brings to the barrier of a step.

    Attributes:
        step: the step whose gradients are ready.
        loss: mean loss per token, on ranks that computed it.
        num_tokens: tokens the losses were normalised by, on ranks that computed the loss.
        found_inf: for each chained optimizer, whether its gradients overflowed.
        grad_norm: global gradient norm, the same on all ranks; None after an overflow.
        stop: whether this rank wants the job to end.
        window_start: start of the newest window that this rank could be recovered from; negative
            when there is none.
        own_s: how long this rank has computed in the step, in seconds; None on all ranks where
            that is not known.
    """

    step: int
    loss: float | None
    num_tokens: int
    found_inf: tuple[bool, ...]
    grad_norm: float | None
    stop: StopRequest
    window_start: int = -1
    own_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What every rank knows behind the barrier of a step; the same on all of them."""

    loss: float
    num_tokens: int
    stop: StopRequest
    window_start: int
    """The least of the ranks': what the whole job could be recovered from."""
    own_s: tuple[float, ...] = ()
    """How long each rank has computed in the step; empty where that is not known."""


class DisagreementError(RuntimeError):
    """Ranks came to the barrier with different steps or different gradient statistics."""


_ABSENT = -1
_PER_SECOND = 1_000_000


def _encode(vote: Vote) -> list[int]:
    loss = _ABSENT
    if vote.loss is not None:
        (loss,) = struct.unpack(">I", struct.pack(">f", vote.loss))
    norm = _ABSENT
    if vote.grad_norm is not None:
        (norm,) = struct.unpack(">q", struct.pack(">d", vote.grad_norm))
    overflow = sum(1 << index for index, flag in enumerate(vote.found_inf) if flag)
    equal_everywhere = (vote.step, norm, overflow)
    return [
        loss,
        vote.num_tokens,
        int(vote.stop),
        -vote.window_start,
        *equal_everywhere,
        *(-value for value in equal_everywhere),
    ]


class CommitBarrier:
    """The barrier of a job; the training thread of every rank calls it once per step."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Uses `group` (default: the whole job), with tensors on `device`."""
        self._device = device
        self._group = group

    def wait(self, vote: Vote) -> Agreement:
        """Waits until every rank has voted, and returns what they agreed on.

        Raises:
            DisagreementError: the ranks' gradients are not those of one step.
        """
        encoded, times = _encode(vote), self._times(vote.own_s)
        votes = torch.tensor(encoded + times, dtype=torch.int64, device=self._device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        values = votes.tolist()
        values, times = values[: len(encoded)], values[len(encoded) :]
        loss, num_tokens, stop, window, *both = values
        greatest, smallest = both[:3], [-value for value in both[3:]]
        for name, high, low in zip(
            ("step", "gradient norm", "overflow"), greatest, smallest, strict=True
        ):
            if high != low:
                raise DisagreementError(
                    f"{name} at the barrier of step {vote.step}: {low} to {high}"
                )
        (loss_value,) = struct.unpack(">f", struct.pack(">I", loss))
        return Agreement(
            loss=loss_value,
            num_tokens=num_tokens,
            stop=StopRequest(stop),
            window_start=-window,
            own_s=tuple(time / _PER_SECOND for time in times),
        )

    def _times(self, own_s: float | None) -> list[int]:
        """Returns a place for each rank, with the own time in that of this rank."""
        if own_s is None:
            return []
        times = [0] * dist.get_world_size(self._group)
        times[dist.get_rank(self._group)] = round(own_s * _PER_SECOND)
        return times
