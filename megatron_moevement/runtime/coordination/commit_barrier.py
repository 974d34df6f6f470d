# SPDX-License-Identifier: Apache-2.0
"""The one point of a step after which every rank may apply it.

No rank applies step k before every rank has finished the backward pass and all gradient reductions
of step k. Megatron gives no such point, so one tiny reduction over the whole job is made per step
and read on the host. It also carries what everybody must learn at the same step.
"""

from __future__ import annotations

import dataclasses
import struct
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_moevement.errors import MoEvementError
from megatron_moevement.policy.copies.commit import agreed_coverage, coverage_vote
from megatron_moevement.policy.watching.measurements import NOT_MEASURED, Reduced
from megatron_moevement.policy.window.timetable import TwoSchedulesError, agreed_version
from megatron_moevement.runtime.interrupts.host_wait import await_on_host


class StopRequest(IntEnum):
    """Why a rank wants the job to end after this step; the greatest wins."""

    NONE = 0
    DURATION = 1
    SIGNAL = 2


@dataclasses.dataclass(frozen=True)
class ReplicaRng:
    """The random streams of one rank, to be compared with those of its replicas.

    Attributes:
        group: number of the group of replicas that the rank is one of.
        groups: how many groups the job has, the same on all ranks.
        digest: of the streams; 0 <= digest < 2^63.
    """

    group: int
    groups: int
    digest: int


NO_SCHEDULE = (0, 0)
"""Of a rank without window schedules."""


@dataclasses.dataclass(frozen=True)
class Vote:
    """What one rank brings to the barrier of a step.

    Attributes:
        step: the step whose gradients are ready.
        loss: mean loss per token, on ranks that computed it.
        num_tokens: tokens the losses were normalised by, on ranks that computed the loss.
        found_inf: for each chained optimizer, whether its gradients overflowed.
        grad_norm: global gradient norm, on all ranks or on none; None after an overflow.
        window_start: start of the newest window that this rank could be recovered from; negative
            when there is none.
        copies: the fewest copies of a slot of that window.
        schedule: what says which window schedules the rank knows.
        measured: how fast the rank copies and sends, where a step is to tell that.
        replica_rng: the rank's random streams as they are now; None on all ranks where nobody wants
            to know.
        own_s: how long this rank has computed in the step, in seconds; None on all ranks where
            that is not known.
        is_writing: whether this rank still writes its part of a checkpoint.
    """

    step: int
    loss: float | None
    num_tokens: int
    found_inf: tuple[bool, ...]
    grad_norm: float | None
    stop: StopRequest
    window_start: int = -1
    copies: int = 0
    schedule: tuple[int, int] = NO_SCHEDULE
    measured: Reduced = NOT_MEASURED
    replica_rng: ReplicaRng | None = None
    own_s: float | None = None
    is_writing: bool = False


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What every rank knows behind the barrier of a step; the same on all of them."""

    loss: float
    num_tokens: int
    grad_norm: float | None
    """The greatest of the ranks', which they all clip by: or replicas would drift apart."""
    stop: StopRequest
    window_start: int
    """The least of the ranks': what the whole job could be recovered from."""
    copies: int = 0
    """The least of the ranks'."""
    schedule: tuple[int, int] = NO_SCHEDULE
    """The greatest of what the ranks brought, number by number."""
    measured: Reduced = NOT_MEASURED
    """The same of what they measured."""
    rng_equal: bool = False
    """Whether within every group of replicas all ranks have the same random streams."""
    own_s: tuple[float, ...] = ()
    """How long each rank has computed in the step; empty where that is not known."""
    is_writing: bool = False
    """Whether any rank still writes its part of a checkpoint."""


class DisagreementError(MoEvementError, RuntimeError):
    """Ranks are not at the same step of the protocol, or find different things in it."""


_ABSENT = -1
_NOBODY = -(2**63)
"""In the place of a group of replicas that a rank is not one of."""
_PER_SECOND = 1_000_000
_ROUNDING = 2.0**-23
"""Of one addition to a norm. Each replica sums it up in a group of its own, in that one's order."""


class _Numbers(NamedTuple):
    """A vote as numbers, of which the greatest of all ranks counts.

    What has to be alike everywhere is there a second time, negated: that gives the least.
    """

    loss: int
    num_tokens: int
    stop: int
    window_start: int
    copies: int
    known_schedule: int
    lacking_schedule: int
    writing: int
    step: int
    norm: int
    overflow: int
    minus_step: int
    minus_norm: int
    minus_overflow: int


def _encode(vote: Vote) -> _Numbers:
    loss = _ABSENT
    if vote.loss is not None:
        (loss,) = struct.unpack(">I", struct.pack(">f", vote.loss))
    norm = _ABSENT
    if vote.grad_norm is not None:
        (norm,) = struct.unpack(">q", struct.pack(">d", vote.grad_norm))  # in the order of norms
    overflow = sum(1 << index for index, flag in enumerate(vote.found_inf) if flag)
    alike_everywhere = (vote.step, norm, overflow)
    return _Numbers(
        loss,
        vote.num_tokens,
        int(vote.stop),
        *coverage_vote(vote.window_start, vote.copies),
        *vote.schedule,
        int(vote.is_writing),
        *alike_everywhere,
        *(-value for value in alike_everywhere),
    )


def _norm_of(bits: int) -> float | None:
    return None if bits == _ABSENT else float(struct.unpack(">d", struct.pack(">q", bits))[0])


def _encode_rng(replica_rng: ReplicaRng | None) -> list[int]:
    """Returns greatest and least digest of each group, as far as this rank knows them."""
    if replica_rng is None:
        return []
    greatest, least = [_NOBODY] * replica_rng.groups, [_NOBODY] * replica_rng.groups
    greatest[replica_rng.group], least[replica_rng.group] = replica_rng.digest, -replica_rng.digest
    return greatest + least


@dataclasses.dataclass(eq=False)
class CommitBarrier:
    """The barrier of a job; the training thread of every rank calls it once per step."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    """None: the whole job."""

    def wait(self, vote: Vote) -> Agreement:
        """Waits until every rank has voted, and returns what they agreed on.

        Raises:
            DisagreementError: the ranks' gradients are not those of one step.
        """
        state, streams, times = _encode(vote), _encode_rng(vote.replica_rng), self._times(vote)
        numbers = [*state, *vote.measured, *streams, *times]
        votes = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        await_on_host(dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        reduced = iter(votes.tolist())
        greatest = _Numbers(*islice(reduced, len(state)))
        measured = Reduced(*islice(reduced, len(vote.measured)))
        rng_equal = _are_equal([*islice(reduced, len(streams))])
        schedule = (greatest.known_schedule, greatest.lacking_schedule)
        window_start, copies = agreed_coverage((greatest.window_start, greatest.copies))
        grad_norm = self._check_alike(vote.step, greatest)
        try:
            agreed_version(schedule)
        except TwoSchedulesError as error:
            raise DisagreementError(f"at the barrier of step {vote.step}: {error}") from error
        (loss_value,) = struct.unpack(">f", struct.pack(">I", greatest.loss))
        return Agreement(
            loss=loss_value,
            num_tokens=greatest.num_tokens,
            grad_norm=grad_norm,
            stop=StopRequest(greatest.stop),
            window_start=window_start,
            copies=copies,
            schedule=schedule,
            measured=measured,
            rng_equal=rng_equal,
            own_s=tuple(value / _PER_SECOND for value in reduced),
            is_writing=bool(greatest.writing),
        )

    def _check_alike(self, step: int, greatest: _Numbers) -> float | None:
        """Checks that all ranks voted on the same; returns the norm to clip by."""
        least_norm = -greatest.minus_norm
        norm, smallest = _norm_of(greatest.norm), _norm_of(least_norm)
        if norm is not None and smallest is not None:
            rounding = norm * dist.get_world_size(self.group) * _ROUNDING
            if norm - smallest <= rounding:
                least_norm = greatest.norm
        for name, high, low in (
            ("step", greatest.step, -greatest.minus_step),
            ("gradient norm", greatest.norm, least_norm),
            ("overflow", greatest.overflow, -greatest.minus_overflow),
        ):
            if high != low:
                raise DisagreementError(f"{name} at the barrier of step {step}: {low} to {high}")
        return norm

    def _times(self, vote: Vote) -> list[int]:
        """Returns a place for each rank's time, with that of this one."""
        if vote.own_s is None:
            return []
        times = [0] * dist.get_world_size(self.group)
        times[dist.get_rank(self.group)] = round(vote.own_s * _PER_SECOND)
        return times


def _are_equal(streams: list[int]) -> bool:
    """Returns whether the greatest and the least digest are the same in each of some groups."""
    groups = len(streams) // 2
    pairs = zip(streams[:groups], streams[groups:], strict=True)
    return groups > 0 and all(greatest == -least for greatest, least in pairs)
