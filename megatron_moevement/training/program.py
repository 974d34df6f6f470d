# SPDX-License-Identifier: Apache-2.0
"""The program: parse, choose the device, check the fork, build this rank's part, train."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_moevement.backends.backend import Backend, BackendName, Collectives, choose, load
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.integrations.megatron.fork.marker import check_fork
from megatron_moevement.policy.report.casualties import Casualty
from megatron_moevement.policy.report.last_lines import ProcessStop
from megatron_moevement.runtime.observation.log import Log, open_log
from megatron_moevement.runtime.observation.process_events import ProcessEvents
from megatron_moevement.settings.architecture import with_layers
from megatron_moevement.settings.cpu_kernels import limit_kept_kernels
from megatron_moevement.settings.launch import Launch
from megatron_moevement.settings.nccl_environment import check_environment, prepare_environment
from megatron_moevement.training.arguments import Arguments, parse
from megatron_moevement.training.watching import open_watch

if TYPE_CHECKING:
    from megatron_moevement.runtime.coordination.generation import Generation, Loss
    from megatron_moevement.strategies.resident_state import IdleSpare
    from megatron_moevement.training.run import Ending, GenerationRun
    from megatron_moevement.training.stop_request import StopSources

logger = logging.getLogger(__name__)
NAME = "pretrain_moe.py"
_NEEDED_LATER = ("torch._dynamo",)
"""What torch imports when the first optimizer is made; a spare has it before it is needed."""


def main(argv: Sequence[str]) -> int:
    """Runs one process of a job and returns its exit code."""
    with open_log(NAME, "rank ?") as log:
        return _main(argv, log)


def _main(argv: Sequence[str], log: Log) -> int:
    launch = None
    # Which package brings NVIDIA's management library is torch's concern.
    warnings.filterwarnings("ignore", message="The pynvml package", category=FutureWarning)
    try:
        launch = Launch.from_environment()
        log.place = f"rank {launch.rank}"
        arguments = parse(argv, launch.processes, launch.world_size)
        launch = launch.occupying(launch.rank, arguments.world_size)
        own = arguments.fault_tolerance.of_process(launch.local_rank)
        arguments = dataclasses.replace(arguments, fault_tolerance=own)
        if arguments.monitoring.enable_ft_package and launch.rank_monitor is None:
            raise UserError(
                "--enable-ft-package: this rank is not monitored (FT_RANK_MONITOR_IPC_SOCKET is "
                "not set); start it with ft_launcher of nvidia-resiliency-ext, "
                "see docs/operate/restart.md"
            )
        restart = arguments.restart
        limit_kept_kernels(os.environ)  # torch is imported below
        if restart.inprocess_restart:
            prepare_environment(restart, os.environ)
        backend = load(choose(arguments.run.moevement_backend))
        if restart.inprocess_restart and backend.collectives is Collectives.NCCL:
            limit = arguments.parallelism.distributed_timeout_minutes
            check_environment(restart, limit, os.environ)
        check_fork()
        _tell_without_effect(arguments, launch)
        arguments = _with_layers(arguments, launch, backend)
        backend.install()
        from megatron_moevement.training.stop_request import StopSources  # noqa: PLC0415

        duration = arguments.run.exit_duration_in_mins
        stop = StopSources(None if duration is None else timedelta(minutes=duration))
        process_events = ProcessEvents(arguments.logging.moevement_event_dir, launch)
        process_events.launched()
        with process_events.ending(), stop.listening():
            try:
                code = _run(
                    arguments, launch, backend, stop, log=log, process_events=process_events
                )
            finally:
                if stop.interrupted:  # whatever has become of the KeyboardInterrupt
                    process_events.ends(ExitCode.INTERRUPTED)
                    _leave_at_once(ExitCode.INTERRUPTED)
        process_events.ends(code)
        if arguments.restart.inprocess_restart:
            _leave_at_once(code)
        return code
    except UserError as error:
        # The ranks of a machine find the same; one line is enough. A process that does not know
        # its rank speaks for itself.
        if launch is None or launch.local_rank == 0:
            logger.error("%s", error)
        return error.exit_code


def _with_layers(arguments: Arguments, launch: Launch, backend: Backend) -> Arguments:
    """Returns the arguments with layers that suit the device; rank 0 says what they lack."""
    on_gpu = backend.name is BackendName.CUDA
    architecture = with_layers(arguments.architecture, on_gpu=on_gpu)
    chosen_here = architecture != arguments.architecture
    if chosen_here and on_gpu and architecture.is_local and launch.rank == 0:
        logger.warning(
            "TransformerEngine is not installed: layers are made of local modules, which have no "
            "flash attention (--transformer-impl local: no line)"
        )
    return dataclasses.replace(arguments, architecture=architecture)


def _tell_without_effect(arguments: Arguments, launch: Launch) -> None:
    if arguments.without_effect and launch.rank == 0:
        logger.info("without an effect here: %s", ", ".join(arguments.without_effect))


def _run(
    arguments: Arguments,
    launch: Launch,
    backend: Backend,
    stop: StopSources,
    *,
    log: Log,
    process_events: ProcessEvents,
) -> int:
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed.*")
    # What torch will rename one day is upstream's concern, not that of who trains.
    upstream = r"(megatron|torch\.distributed)\."
    warnings.filterwarnings("ignore", category=FutureWarning, module=upstream)
    watch = None
    if arguments.monitoring.enable_ft_package and not arguments.restart.inprocess_restart:
        watch = open_watch(arguments)  # imports may hang, too
        watch.restart()
    # From here on Megatron is imported, with the backend in place; spares import it too.
    from megatron_moevement.training.resident import Resident  # noqa: PLC0415
    from megatron_moevement.training.run import GenerationRun  # noqa: PLC0415

    if arguments.restart.inprocess_restart:
        for name in _NEEDED_LATER:
            importlib.import_module(name)
    log.show(arguments.logging.logging_level)
    resident = Resident(arguments, backend, watch, process_events)
    run = GenerationRun(arguments, resident, stop)
    try:
        if arguments.restart.inprocess_restart:
            return _run_restartable(run, arguments, launch, backend, log)
        return _run_alone(run, launch)
    finally:
        _let_go(run, stop)


def _run_alone(run: GenerationRun, launch: Launch) -> int:
    """Runs in the only generation of a process; returns the exit code."""
    from megatron_moevement.strategies.strategy import (  # noqa: PLC0415
        CaptureLostError,
        UnverifiedReplayError,
    )

    try:
        run.alone(launch)
    except (CaptureLostError, UnverifiedReplayError) as error:
        return _stop(run, launch, error, None)
    return ExitCode.DONE


def _let_go(run: GenerationRun, stop: StopSources) -> None:
    """Closes what outlives generations, and gives it up if Ctrl-C was pressed, even meanwhile."""
    try:
        if not stop.interrupted:
            run.resident.close()
    finally:
        stop.only_note()
        if stop.interrupted:
            stop.clean_up(run.abandon)


def _stop(
    run: GenerationRun,
    launch: Launch,
    reason: Exception,
    save: str | None,
    *,
    first: str = "",
    losses: Sequence[Loss] = (),
) -> ExitCode:
    """Writes what a relaunch goes on from where it was asked for, and says where it is.

    Args:
        save: folder of the durable checkpoints, where the job stops and there is one.
        first: what to do before another launch; all processes need it, those without a state too.
        losses: that led to it.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, so there is to be nothing to go on from.
    """
    run.stop.check()
    resident = run.resident
    store, step = resident.kept.store, resident.committed
    if first and store.is_over:  # the ranks have left, and the stores with them
        return ExitCode.DONE
    store.stay()
    where = None
    if store.has_state:
        where = "memory"
        if save is not None:
            try:
                where = str(store.flush(Path(save)))
            except OSError as error:
                where = f"memory, and not in --save {save}: {error.strerror or error}"
    casualties = [Casualty(**dataclasses.asdict(loss)) for loss in losses]
    stop = ProcessStop(
        *(launch.process, str(reason), casualties, where, step, first), resident.event_dir
    )
    logger.error("%s", stop.line)
    return ExitCode.STATE_FLUSHED if where is not None or first else ExitCode.FAILURE


def _leave_at_once(code: int) -> NoReturn:
    """Ends the process without destructors: one of a former generation's group may be stuck."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run_restartable(
    run: GenerationRun, arguments: Arguments, launch: Launch, backend: Backend, log: Log
) -> int:
    """Runs until training ends, restarting after faults; returns the exit code."""
    from megatron_moevement.integrations.nvrx.restarter import (  # noqa: PLC0415
        ControlStoreLostError,
        DiscardedError,
        Restartable,
        RestartsEndedError,
        UnfitError,
        run_restartable,
    )
    from megatron_moevement.strategies.strategy import UnprovenStateError  # noqa: PLC0415

    resident = run.resident

    def train(generation: Generation, place: Launch) -> Ending | None:
        log.place = f"rank {place.rank}"
        return run.in_generation(generation, place)

    def wait(generation: Generation) -> IdleSpare:
        log.place = f"spare {launch.process}"
        return resident.hold(generation, launch, domain)

    # A monitor is forked from here: with a device it would keep the memory of a killed process.
    backend.check_device(launch.local_rank)
    domain = arguments.fault_tolerance.moevement_failure_domain or launch.failure_domain
    try:
        failure = run_restartable(
            Restartable(
                train,
                wait,
                run.leave,
                lambda: resident.futility,
                resident.check_health,
                backend.collectives,
                resident.interruption,
                domain,
            ),
            arguments.restart,
            launch,
        )
    except ControlStoreLostError as error:
        first = "host new stores and " if error.has_begun else ""
        return _stop(run, launch, error, None, first=first)
    except (DiscardedError, UnfitError) as error:
        # A process that is given up keeps its memory too: the others may be too few to go on.
        return _stop(run, launch, error, None)
    except RestartsEndedError as error:
        return _stop(run, launch, error, arguments.checkpointing.save, losses=error.losses)
    if isinstance(failure, UserError):
        if run.place is not None and run.place.rank == 0:  # all ranks find the same
            logger.error("%s", failure)
        return failure.exit_code
    if isinstance(failure, UnprovenStateError):
        return _stop(run, launch, failure, arguments.checkpointing.save)
    if failure is not None:
        raise failure
    return ExitCode.DONE
