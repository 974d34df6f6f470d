# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, in a job: armed before training, accounted for after it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.policy.faults.fault_schedule import TimedFault
from megatron_moevement.runtime.coordination.agreement import (
    all_gather_json,
    as_user_error,
    together,
)
from megatron_moevement.runtime.coordination.progress import Progress
from megatron_moevement.runtime.faults.fault_points import FaultPoints, never_struck
from megatron_moevement.runtime.faults.fault_timer import FaultTimer
from megatron_moevement.runtime.observation.events import EventName, Events
from megatron_moevement.runtime.slots.store_identity import RunIdentity
from megatron_moevement.runtime.stores.fault_record import FaultRecord, forget_rank
from megatron_moevement.runtime.stores.place import store_place
from megatron_moevement.settings.faults import Fault, FaultPoint
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.arguments import Arguments
from megatron_moevement.training.job import Job
from megatron_moevement.training.run_identity import identify

logger = logging.getLogger(__name__)


class NeverStruckError(UserError):
    """The job is done and a scripted fault never struck: what was to be shown was not."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE


def scripted_faults(
    arguments: Arguments, launch: Launch, identity: RunIdentity | None
) -> FaultPoints:
    """Returns the fault points of a process that has yet to join the job.

    What struck while a process joined is known on its own machine alone.

    Args:
        identity: of the run; None where this process has not been told yet, and finds it itself.
    """
    points = FaultPoints(arguments.fault_injection.moevement_faults, launch.rank)
    if any(
        fault.place is FaultPoint.CONNECT for fault in arguments.fault_injection.moevement_faults
    ):
        place = store_place(arguments.fault_tolerance, identity or identify(arguments))
        with contextlib.closing(FaultRecord(*place, launch.rank)) as record:
            points.know(record.read().struck)
        points.tell(_note_outside(place, launch.rank))
    return points


def _note_outside(place: tuple[Path, str], rank: int) -> Callable[[Fault], None]:
    """Returns what notes a fault that strikes while no generation has the record open."""

    def note(fault: Fault) -> None:
        with contextlib.closing(FaultRecord(*place, rank)) as record:
            record.note(str(fault))

    return note


@contextlib.contextmanager
def injected_faults(job: Job, events: Events) -> Iterator[None]:
    """Lets faults strike this process until the block ends; every rank calls it, in step.

    A relaunch goes on with the clock of the first launch, and with what struck already. That is
    forgotten when the block ends by itself or by Ctrl-C, as snapshots are.

    Args:
        events: told of each fault just before it strikes.

    Raises:
        UserError: on all ranks: the record can't be kept, or they were told of different faults.
    """
    settings = job.arguments.fault_tolerance
    place, rank = store_place(settings, job.identity), job.launch.rank
    armed = _armed(job, events, place) if job.arguments.fault_injection.is_on else None
    try:
        with armed or contextlib.nullcontext():
            yield
    except KeyboardInterrupt:
        if not settings.moevement_recover_only:
            forget_rank(*place, rank)
        raise
    if not settings.moevement_recover_only:
        forget_rank(*place, rank)  # a former launch may have been told of faults


@contextlib.contextmanager
def _armed(job: Job, events: Events, place: tuple[Path, str]) -> Iterator[None]:
    """Arms the faults; `job` may be empty when the block ends: it was to be built anew."""
    settings, faults = job.arguments.fault_injection, job.faults
    rank = job.launch.rank
    root, run_id = place
    with as_user_error():
        record = together(lambda: FaultRecord(root, run_id, rank), job.device)

    def scripted(fault: Fault) -> None:
        record.note(str(fault))
        events.emit(
            EventName.FAULT_INJECTED, fault.step, kind=fault.kind, place=fault.place, at_s=None
        )

    def timed(fault: TimedFault) -> None:
        at_s = fault.at.total_seconds()
        events.emit(EventName.FAULT_INJECTED, faults.step, kind=fault.kind, place=None, at_s=at_s)

    own = (one for one in settings.timed_faults(job.launch.world_size) if one.rank == rank)
    with contextlib.closing(record):
        began_s = _begin(job, record)
        faults.tell(scripted)
        try:
            with FaultTimer(own, began_s, timed) if settings.draws else contextlib.nullcontext():
                yield
        finally:  # the next generation connects before it has a record
            faults.tell(_note_outside(place, rank))


def _begin(job: Job, record: FaultRecord) -> float:
    """Returns when the job began, and disarms what struck before; the same on all ranks."""
    known = record.read()
    settings = dataclasses.asdict(job.arguments.fault_injection)
    told = hashlib.sha256(repr(settings).encode()).hexdigest()
    mine = {
        "told": told,
        "now_s": time.time(),
        "began_s": known.began_s,
        "struck": sorted(known.struck),
    }
    everybody = all_gather_json(mine, job.device)
    if any(one["told"] != told for one in everybody):
        raise UserError("the flags of faults on purpose differ between ranks; give all the same")
    job.faults.know({fault for one in everybody for fault in one["struck"]})
    known_s = [one["began_s"] for one in everybody if one["began_s"] is not None]
    began_s = float(min(known_s, default=everybody[0]["now_s"]))
    if known.began_s is None:
        record.begin(began_s)
    return began_s


def tell_what_lies_behind(job: Job, start: int) -> None:
    """Tells the fault points where this launch begins, and the user which faults can't strike.

    Args:
        start: the step whose state it begins with.
    """
    job.faults.begin_at(start)
    behind = [
        str(fault)
        for fault in job.arguments.fault_injection.moevement_faults
        if fault.place.is_of_step and fault.step < start
    ]
    if behind and dist.get_rank() == 0:
        logger.warning(
            "--moevement-faults: %s: this launch begins with the state of step %d",
            *(", ".join(behind), start),
        )


def check_struck(job: Job, progress: Progress) -> None:
    """Checks that every scripted fault struck whose step the job has come to; every rank calls it.

    Raises:
        NeverStruckError: on all ranks, if one did not.
    """
    scripted = job.arguments.fault_injection.moevement_faults
    if not scripted or job.arguments.fault_tolerance.moevement_recover_only:
        return
    spared = sorted(job.faults.spared(progress.committed))
    everybody = all_gather_json([job.launch.rank, spared], job.device)
    never = never_struck(scripted, everybody, job.launch.world_size)
    if never:
        raise NeverStruckError(
            f"--moevement-faults: {', '.join(never)} never struck: no struck rank came to that "
            "place, in that step and generation"
        )
