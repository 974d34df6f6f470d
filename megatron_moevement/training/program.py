"""The program: parse, choose the device, check the fork, build this rank's part, train."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from megatron_moevement.backends.backend import Backend, choose, load
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.integrations.megatron.fork.marker import check_fork
from megatron_moevement.settings.launch import Launch
from megatron_moevement.training.arguments import Arguments, parse
from megatron_moevement.training.stop_request import StopSources

_PATIENCE_DONE = timedelta(seconds=60)
"""The last rank draws its plots and closes its writers meanwhile."""
_PATIENCE_REFUSED = timedelta(seconds=5)
"""All ranks find the same, each in its own time; one alone must not wait for long."""


def main(argv: Sequence[str]) -> int:
    """Runs one process of a job and returns its exit code."""
    launch = None
    try:
        launch = Launch.from_environment()
        arguments = parse(argv, launch.world_size)
        backend = load(choose(arguments.run.moevement_backend))
        check_fork()
        backend.install()
        duration = arguments.run.exit_duration_in_mins
        stop = StopSources(None if duration is None else timedelta(minutes=duration))
        with stop.listening():
            _run(arguments, launch, backend, stop)
    except UserError as error:
        # The ranks of a machine find the same; one line is enough. A process that does not know
        # its rank speaks for itself.
        if launch is None or launch.local_rank == 0:
            print(f"pretrain_moe.py: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return ExitCode.DONE


def _run(arguments: Arguments, launch: Launch, backend: Backend, stop: StopSources) -> None:
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed.*")
    # What torch will rename one day is upstream's concern, not that of who trains.
    upstream = r"(megatron|torch\.distributed)\."
    warnings.filterwarnings("ignore", category=FutureWarning, module=upstream)
    # From here on Megatron is imported, with the backend in place.
    from megatron_moevement.integrations.megatron.process_groups import leave_job  # noqa: PLC0415
    from megatron_moevement.training.fault_injection import check_struck  # noqa: PLC0415
    from megatron_moevement.training.job import build_job  # noqa: PLC0415
    from megatron_moevement.training.loop import train  # noqa: PLC0415
    from megatron_moevement.training.operator_table import write_operators  # noqa: PLC0415
    from megatron_moevement.training.state_digest import (  # noqa: PLC0415
        check_state_digest_path,
        write_state_digest,
    )

    file = arguments.run.moevement_state_digest
    patience = timedelta(0)  # after a failure: closed connections tell the peers
    try:
        job = build_job(arguments, launch, backend)
        operators = arguments.fault_tolerance.moevement_operators
        if operators is not None:
            write_operators(job, Path(operators))
        else:
            if file is not None:
                check_state_digest_path(job, Path(file))
            progress = train(job, stop)
            if file is not None:
                write_state_digest(job, progress, Path(file))
            check_struck(job, progress)
        patience = _PATIENCE_DONE
    except UserError:
        patience = _PATIENCE_REFUSED
        raise
    finally:
        leave_job(patience)
