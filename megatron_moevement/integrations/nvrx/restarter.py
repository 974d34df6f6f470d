# SPDX-License-Identifier: Apache-2.0
"""In-process restart: the training function runs in NVRx's wrapper, put together from settings.

Every process of the job calls `run_restartable`, spares too: they wait inside of the wrapper until
they take the place of a lost process. Restarts are numbered alike on all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess import CallWrapper
from nvidia_resiliency_ext.inprocess.exception import HealthCheckError, RestartAbort
from nvidia_resiliency_ext.inprocess.rank_assignment import RankDiscarded
from nvidia_resiliency_ext.inprocess.store import BarrierError, BarrierTimeout

from megatron_moevement.backends.backend import Collectives
from megatron_moevement.errors import MoEvementError, UserError
from megatron_moevement.integrations.nvrx.control_store import (
    ControlStore,
    mend_generation_stores,
)
from megatron_moevement.integrations.nvrx.health import ProcessHealth
from megatron_moevement.integrations.nvrx.heartbeats import mend_heartbeats
from megatron_moevement.integrations.nvrx.interrupts import mend_interrupts
from megatron_moevement.integrations.nvrx.notices import StoredBoard
from megatron_moevement.integrations.nvrx.rank_assignment import AllDoneError, StickyRankAssignment
from megatron_moevement.integrations.nvrx.reserve import CalledWrapper, Holder, mend_reserve
from megatron_moevement.integrations.nvrx.retries import BoundedRetries, StartAgainAbort
from megatron_moevement.integrations.nvrx.sealed_store import ForeignValueError
from megatron_moevement.integrations.nvrx.teardown import (
    AbortCollectives,
    EndGeneration,
    ShutDownConnections,
)
from megatron_moevement.integrations.nvrx.termination import mend_termination
from megatron_moevement.policy.outcome.futility import Futility, InVainError
from megatron_moevement.runtime.coordination.generation import Generation, Interruption, Loss
from megatron_moevement.runtime.coordination.roll_call import LostAtStartError, RollCall
from megatron_moevement.runtime.interrupts.group_calls import close_calls_that_fail
from megatron_moevement.runtime.interrupts.host_wait import poll_before_reads
from megatron_moevement.runtime.interrupts.interruptible_wait import make_waits_interruptible
from megatron_moevement.runtime.peers.log_reader import LogReadError
from megatron_moevement.runtime.peers.sender import FetchError
from megatron_moevement.runtime.peers.state_reader import StateReadError
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.restart import InProcessRestart
from megatron_moevement.settings.secret import SECRET_VARIABLE

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SAID_IN_ONE_LINE = (
    *(OSError, dist.DistError, InVainError),
    *(FetchError, LogReadError, StateReadError),
)
"""What tells of a lost peer, or says all itself."""

_LOOKS_OF_THE_MONITOR = 3
"""A process that is gone before its monitor has looked is taken for a lost one."""


class RestartsEndedError(MoEvementError):
    """The job stops here, with what it has in memory; the message says why.

    Attributes:
        losses: the processes whose loss ended the newest generation, where that is known.
    """

    def __init__(self, message: str, losses: Sequence[Loss] = ()) -> None:
        super().__init__(message)
        self.losses = losses


class ControlStoreLostError(RestartsEndedError):
    """Nobody hosts the control store any more.

    Attributes:
        has_begun: whether there was any generation before, so that another launch makes sense.
    """

    def __init__(self, message: str, *, has_begun: bool) -> None:
        super().__init__(message)
        self.has_begun = has_begun


class DiscardedError(MoEvementError):
    """This process is given up with its failure domain; the job goes on without it."""


class UnfitError(MoEvementError):
    """This process or its machine is not healthy, the message says why; the job goes on."""


class _GenerationFailedError(MoEvementError):
    """An exception of the training function, in a form that NVRx can copy."""


@dataclasses.dataclass(frozen=True)
class Restartable(Generic[T]):
    """What is restarted.

    Attributes:
        run: trains; called with the generation, and with the place that the process occupies in it.
        hold: called with the generation where the process waits for a place; returns what it keeps
            for the ranks meanwhile.
        end: cleans up after a generation that was interrupted.
        futility: returns what the processes found of their progress when they met last.
        check_health: raises an exception where this process had better not go on.
        collectives: what carries those of the model.
        interruption: is told of the newest one.
        domain: what this process may be lost together with.
    """

    run: Callable[[Generation, Launch], T]
    hold: Callable[[Generation], Holder]
    end: Callable[[], None]
    futility: Callable[[], Futility]
    check_health: Callable[[], None]
    collectives: Collectives
    interruption: Interruption
    domain: str


def run_restartable(
    what: Restartable[T],
    settings: InProcessRestart,
    launch: Launch,
) -> T | None:
    """Runs a training function until it returns on all ranks, restarting it after every fault.

    Args:
        launch: what the launcher says of this process, and how many ranks train.

    Returns:
        What `run` returned; None on a spare that was not needed.

    Raises:
        UserError: the launcher serves no stores.
        RestartsEndedError: too few processes are left, or restarts are of no use.
        DiscardedError: other processes take over what this one did.
        UnfitError: so they do where this one is not healthy.
        ControlStoreLostError: the control store is lost, and training has not ended.
    """
    returned: list[T] = []
    times = settings.times
    _prepare_process(launch)
    wrapper: Any = None
    result: T | None
    try:
        kwargs = _connection(launch, times["barrier_timeout"])
        store, roll = ControlStore(**kwargs), _roll_of(launch, times["barrier_timeout"])
        while True:
            wrapper = _wrapper(
                *(what, settings, launch),
                processes=_numbered(roll.call(store.connection), launch),
                store_kwargs=kwargs | {"roll": roll},
                await_watched=lambda: roll.await_hold(store.connection),
                ends=lambda awaited: roll.ends(store.connection, awaited),
            )
            board_of = mend_reserve(wrapper, what.hold, lambda: ControlStore(**kwargs, roll=roll))
            with contextlib.suppress(LostAtStartError, StartAgainAbort), _start_of(roll, store):
                result = wrapper(_training_function(what, launch, board_of, returned))()
                break
    except AllDoneError:
        result = returned[0] if returned else None
    except RestartAbort as error:
        losses = what.interruption.losses
        with contextlib.suppress(dist.DistError):  # the launcher does without
            roll.note_stop(store.connection, str(error), losses)
        raise RestartsEndedError(str(error), losses) from None
    except RankDiscarded as error:
        raise DiscardedError("the others have given it up, or its failure domain") from error
    except HealthCheckError as error:
        raise UnfitError(f"it is not healthy: {error.__cause__}") from error
    except (BarrierError, ForeignValueError) as error:
        raise RestartsEndedError(f"processes did not meet: {error}") from None
    except dist.DistError as error:
        if returned:
            return returned[0]
        raise _control_store_lost(launch, error, wrapper) from error
    time.sleep(_LOOKS_OF_THE_MONITOR * times["monitor_process_interval"].total_seconds())
    return result


def _prepare_process(launch: Launch) -> None:
    """Gets a process ready for restarts."""
    _check_stores(launch)
    # The wrapper collects garbage at every restart: what is there by now is none.
    gc.collect()
    gc.freeze()
    warnings.filterwarnings("ignore", message="logging not initialized")
    logging.getLogger("nvidia_resiliency_ext").setLevel(logging.CRITICAL + 1)  # we say it ourselves


def _wrapper(
    what: Restartable[T],
    settings: InProcessRestart,
    launch: Launch,
    *,
    processes: Sequence[int],
    store_kwargs: dict[str, Any],
    await_watched: Callable[[], None],
    ends: Callable[[Collection[int]], Mapping[int, str]],
) -> Any:
    """Puts NVRx's wrapper together."""
    assert launch.store is not None
    mend_generation_stores()
    mend_heartbeats()
    mend_termination()
    mend_interrupts()
    abort: AbortCollectives | ShutDownConnections
    if what.collectives is Collectives.NCCL:
        poll_before_reads()
        close_calls_that_fail()
        abort = AbortCollectives(launch.store[1], what.interruption)
    else:
        make_waits_interruptible()
        abort = ShutDownConnections(store_kwargs["port"], what.interruption)
    active = launch.world_size
    return CalledWrapper(
        store_factory=ControlStore,
        store_kwargs=store_kwargs,
        initialize=BoundedRetries(
            active, settings.inprocess_max_iterations, what.futility, await_watched
        ),
        abort=abort,
        finalize=EndGeneration(what.end, empty_cuda_cache=settings.inprocess_empty_cuda_cache),
        health_check=ProcessHealth(what.check_health),
        rank_assignment=StickyRankAssignment(
            *(active, settings.inprocess_granularity, what.domain, what.interruption, processes),
            ends=ends,
        ),
        **settings.times,
    )


def _connection(launch: Launch, timeout: timedelta) -> dict[str, Any]:
    """Returns how this process connects to the control store."""
    assert launch.control_store is not None
    host, port = launch.control_store
    return {
        "host": host,
        "port": port,
        "timeout": timeout,
        "secret": launch.secret,
        "attempt": launch.attempt,
    }


def _roll_of(launch: Launch, patience: timedelta) -> RollCall:
    assert launch.secret is not None
    members = (launch.process, launch.processes)
    return RollCall(*members, secret=launch.secret, attempt=launch.attempt, patience=patience)


@contextlib.contextmanager
def _start_of(roll: RollCall, store: ControlStore) -> Iterator[None]:
    """Has a process whose barrier is over first find whether the roll is called again.

    Barriers of the start have the limit of the roll call, and end for some before it is decided.

    Raises:
        LostAtStartError: it is.
    """
    try:
        yield
    except (BarrierTimeout, dist.DistStoreError):
        roll.await_hold(store.connection)
        raise


def _tell(generation: int, process: int, error: Exception) -> None:
    """Says why a generation ends; what only tells of a lost peer needs no traceback."""
    text = " ".join(str(error).split())
    line = f"generation {generation} of process {process} ends: {type(error).__name__}: {text}"
    explains_itself = isinstance(error, _SAID_IN_ONE_LINE)
    is_consequence = type(error) is RuntimeError
    logger.warning("%s", line, exc_info=None if explains_itself or is_consequence else error)


def _check_stores(launch: Launch) -> None:
    """Checks what in-process restart needs of a launcher.

    Raises:
        UserError: it serves no stores, or has made no secret.
    """
    if launch.control_store is None or launch.store is None:
        raise UserError(
            "--inprocess-restart needs stores that are hosted outside of the ranks: start with "
            "scripts/run_local.sh, or run `moevement stores` and give each rank what it prints"
        )
    if launch.secret is None:
        raise UserError(
            f"--inprocess-restart needs {SECRET_VARIABLE}, the same random characters for all "
            "processes: start with scripts/run_local.sh, or give each rank what "
            "`moevement stores` prints"
        )


def _numbered(called: tuple[int, ...], launch: Launch) -> tuple[int, ...]:
    """Takes the number that NVRx counts this process by, which is its own if nobody is missing.

    Returns:
        The processes that take part.

    Raises:
        DiscardedError: the others have begun without it.
        RestartsEndedError: too few take part.
    """
    if launch.process not in called:
        raise DiscardedError("it came too late: the others have begun without it")
    if len(called) < launch.world_size:
        raise RestartsEndedError(
            f"the job needs {launch.world_size} processes and has {len(called)}: others were lost "
            "before they had begun"
        )
    os.environ["RANK"] = str(called.index(launch.process))
    os.environ["WORLD_SIZE"] = str(len(called))
    return called


def _control_store_lost(launch: Launch, error: Exception, wrapper: Any) -> ControlStoreLostError:
    assert launch.control_store is not None
    has_begun = wrapper is not None and wrapper.initialize.has_begun
    where = "the control store at {}:{}".format(*launch.control_store)
    if not has_begun:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return ControlStoreLostError(f"{where} does not answer: {reason}", has_begun=False)
    return ControlStoreLostError(f"{where} is lost", has_begun=True)


def _training_function(
    what: Restartable[T],
    launch: Launch,
    board_of: Callable[[int], StoredBoard],
    returned: list[T],
) -> Callable[[], T | None]:
    """Returns what the wrapper calls, which finds its parameter by the type."""

    def train(call: Any = None) -> T:
        returned.clear()
        board = board_of(call.iteration)
        place = launch.occupying(call.state.active_rank, launch.world_size)
        generation = Generation(
            call.iteration,
            call.atomic,
            call.ping,
            call.progress_watchdog.reset,
            spares=call.state.world_size - launch.world_size,
            board=board,
            # An aborted collective of gloo fails on all of its ranks.
            is_interrupted=lambda: (
                what.collectives is Collectives.NCCL and board.store.is_interrupted()
            ),
        )
        try:
            returned.append(what.run(generation, place))
            return returned[0]
        except Exception as error:
            _tell(generation.number, launch.process, error)
            # NVRx copies the exception, which fails with constructors of our own.
            raise _GenerationFailedError(f"{type(error).__name__}: {error}") from error

    train.__annotations__ = {"call": CallWrapper}
    return train
