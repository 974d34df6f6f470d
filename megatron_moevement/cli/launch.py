# SPDX-License-Identifier: Apache-2.0
"""`moevement launch`, `scripts/run_local.sh`: starts the ranks of a job here and waits for them.

The launcher hosts two stores, so that no rank's death takes them away: that of training, and the
control store of in-process restart. Otherwise it leaves the ranks alone: each is a process of its
own, in a session of its own. A rank that dies ends the job, unless spares or in-process restart are
there to go on without it. If the launcher dies, the kernel kills the ranks.

What a rank finds in its environment: `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and `LOCAL_WORLD_SIZE`
(spares counted), `MOEVEMENT_ACTIVE_RANKS` (spares not counted), `MASTER_ADDR` and `MASTER_PORT`
of the store, `MOEVEMENT_CONTROL_PORT` of the other one, `MOEVEMENT_SECRET` (random, of this
launch), `MOEVEMENT_LAUNCH` (its name among the events),
`MOEVEMENT_FAILURE_DOMAIN` (the rank, unless set before) and `OMP_NUM_THREADS` (an equal
share of the cores, unless set before).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING

from megatron_moevement.cli.job_end import (
    RecordedEnds,
    describe_status,
    end_document,
    event_dir_of,
    report_death,
    report_end,
)
from megatron_moevement.cli.left_processes import started_ranks
from megatron_moevement.cli.metrics import add_metrics_address, open_metrics
from megatron_moevement.cli.output import add_json_flag, document_alone, show
from megatron_moevement.cli.stores import allow_connections, serve_store
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.runtime.observation.log import open_log
from megatron_moevement.settings.launch import LAUNCH_VARIABLE
from megatron_moevement.settings.parser import Parser
from megatron_moevement.settings.secret import SECRET_VARIABLE, Secret, new_secret

if TYPE_CHECKING:
    from megatron_moevement.policy.report.last_lines import JobEnd
    from megatron_moevement.runtime.coordination.roll_call import JobStop, Store

HELP = "start the ranks of a job on this machine"
DESCRIPTION = """
Starts the ranks of a job on this machine, waits for them, and returns the job's exit code. What
follows -- goes to the program. In it, --inprocess-restart keeps a dying rank from ending the job;
so do spares.
"""
NAME = "moevement launch"
STORE_ADDRESS = "127.0.0.1"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
SIGNAL_EXIT_BASE = 128
PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_moe.py"
GRACE = timedelta(seconds=30)


@dataclass(frozen=True)
class StorePorts:
    """Where the two stores of a job are served."""

    training: int
    control: int


class OnDeath(Enum):
    """What the death of a rank means to the others."""

    STOP_THE_JOB = "stop"
    CARRY_ON = "carry on"


@dataclass(frozen=True)
class Job:
    """What to start."""

    active_ranks: int
    spare_ranks: int
    program: Path
    flags: tuple[str, ...]
    grace: timedelta
    """Time until SIGKILL: after SIGTERM for the others when a rank has failed, and after Ctrl-C."""
    log_directory: Path | None
    metrics_address: tuple[str, int] | None = None
    """Where metrics are served; None: they are not."""
    name: str = NAME
    """Of the command that starts it, in what it says."""

    @property
    def world_size(self) -> int:
        """Number of processes, spares counted."""
        return self.active_ranks + self.spare_ranks

    @property
    def on_death(self) -> OnDeath:
        """Spares and in-process restart are there so that the others carry on."""
        if self.spare_ranks or "--inprocess-restart" in self.flags:
            return OnDeath.CARRY_ON
        return OnDeath.STOP_THE_JOB


@dataclass(frozen=True)
class RankExit:
    """How a rank ended: its exit status, or the negative number of the signal that killed it."""

    rank: int
    status: int

    @property
    def code(self) -> int:
        """The status as a shell reports it."""
        return self.status if self.status >= 0 else SIGNAL_EXIT_BASE - self.status


def job_exit_code(job: Job, exits: Sequence[RankExit]) -> int:
    """Returns the job's exit code.

    Where the others carry on, a rank killed by a signal is a fault that they dealt with: the job
    is done when as many ranks as were active ended well, and otherwise what the survivors say
    counts more than what killed the dead, and that state is kept more than what else failed.
    Ctrl-C counts most: whoever had stopped before, for a relaunch, must not be taken at its word.

    Args:
        exits: How every rank ended, in the order of their deaths.
    """
    failed = [end for end in exits if end.status != 0]
    if job.on_death is OnDeath.CARRY_ON:
        if len(exits) - len(failed) >= job.active_ranks:
            return ExitCode.DONE
        first = (ExitCode.INTERRUPTED, ExitCode.STATE_FLUSHED)
        failed.sort(key=lambda end: ([end.status != code for code in first], end.status < 0))
    return failed[0].code if failed else ExitCode.DONE


def in_order_of_cause(exits: Sequence[RankExit]) -> list[RankExit]:
    """Orders deaths noticed at one time: a killed rank first, for its peers fail because of it."""
    return sorted(exits, key=lambda end: end.status >= 0)


def rank_environment(
    job: Job, rank: int, ports: StorePorts, secret: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of one rank."""
    size = str(job.world_size)
    # A process that may be restarted asks its store again and again; each would be a warning.
    quiet = {"TORCH_CPP_LOG_LEVEL": "error"} if "--inprocess-restart" in job.flags else {}
    defaults = {
        "MOEVEMENT_FAILURE_DOMAIN": str(rank),
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // job.active_ranks)),
    }
    return {
        **defaults,
        **quiet,
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MOEVEMENT_ACTIVE_RANKS": str(job.active_ranks),
        "MASTER_ADDR": STORE_ADDRESS,
        "MASTER_PORT": str(ports.training),
        "MOEVEMENT_CONTROL_PORT": str(ports.control),
        SECRET_VARIABLE: secret,
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def launch(job: Job) -> JobEnd:
    """Runs a job to its end and returns how it ended. Call it from the main thread.

    Raises:
        UserError: Something that the ranks need is missing; nothing was started.
    """
    if not job.program.is_file():
        raise UserError(f"no program at {job.program}: name one with --program")
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"torch is not installed for {sys.executable}: run scripts/setup.sh")
    watched = {signal.SIGCHLD, *FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        with started_ranks() as ranks, contextlib.ExitStack() as stack:
            stack.enter_context(open_log(job.name, "launcher"))
            outputs = [stack.enter_context(output) for output in _outputs(job)]
            allow_connections(job.world_size)
            metrics = open_metrics(stack, job.metrics_address, event_dir_of(job.flags))
            # The ranks connect to a socket that listens already and wait until it is served.
            # They are started first: importing torch starts threads, and forking is safe before.
            listeners = [
                stack.enter_context(socket.create_server((STORE_ADDRESS, 0), backlog=1024))
                for _ in range(2)
            ]
            ports = StorePorts(*(listener.getsockname()[1] for listener in listeners))
            ready, secret = _rank_preparation(before), new_secret()
            ends = RecordedEnds(job.flags)
            for rank in range(job.world_size):
                environment = rank_environment(job, rank, ports, secret, os.environ)
                environment[LAUNCH_VARIABLE] = ends.launch
                ranks.append(_start(job, environment, outputs[rank], ready))
            stores = [serve_store(listener, STORE_ADDRESS) for listener in listeners]
            metrics()
            key = Secret(secret.encode())
            exits, stop = _supervise(job, ranks, watched, stores[1], key, ends=ends)
            del stores
            code = job_exit_code(job, exits)
            return report_end(code, [(end.rank, end.status) for end in exits], job.flags, stop)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outputs(job: Job) -> Iterator[contextlib.AbstractContextManager[IO[bytes] | None]]:
    """Yields where each rank's output goes: this process's own, or a file per rank."""
    if job.log_directory is None:
        yield from (contextlib.nullcontext() for _ in range(job.world_size))
        return
    try:
        job.log_directory.mkdir(parents=True, exist_ok=True)
        for rank in range(job.world_size):
            yield (job.log_directory / f"rank_{rank}.log").open("ab")
    except OSError as error:
        raise UserError(f"--log-dir {job.log_directory}: {error.strerror}") from error


def _rank_preparation(mask: set[signal.Signals | int]) -> Callable[[], None]:
    """Returns what a rank does between fork and exec: die with the launcher, take signals."""
    libc = ctypes.CDLL(None)
    launcher = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(ExitCode.FAILURE)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare


def _start(
    job: Job, environment: dict[str, str], output: IO[bytes] | None, prepare: Callable[[], None]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-u", str(job.program), *job.flags],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        # A terminal's Ctrl-C then reaches the launcher alone, which forwards it once.
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509  (safe: no thread has been started yet)
    )


def _supervise(
    job: Job,
    ranks: Sequence[subprocess.Popen[bytes]],
    watched: set[signal.Signals],
    control: Store,
    secret: Secret,
    *,
    ends: RecordedEnds,
) -> tuple[list[RankExit], JobStop | None]:
    """Waits until every rank has ended; forwards signals; stops the others after a failure.

    The others learn from the control store who has ended, and how.

    Returns:
        How the ranks ended, and why they stopped the job, if they did.
    """
    from megatron_moevement.runtime.coordination.roll_call import (  # noqa: PLC0415  (imports torch)
        note_gone,
        noted_stop,
        promise_notes,
    )

    exits: list[RankExit] = []
    running = dict(enumerate(ranks))
    deadline: float | None = None
    promise_notes(control, secret)
    while True:
        had_failed = any(end.status != 0 for end in exits)
        exits += in_order_of_cause(
            [RankExit(rank, p.returncode) for rank, p in running.items() if p.poll() is not None]
        )
        for end in [end for end in exits if end.rank in running]:
            note_gone(control, end.rank, secret, end=describe_status(end.status))
            ends.record(end.rank, ranks[end.rank].pid, end.status)
            if end.status < 0:
                report_death(end.rank, end.status)
        running = {rank: p for rank, p in running.items() if p.returncode is None}
        if not running:
            return exits, noted_stop(control, secret)
        fails_now = not had_failed and any(end.status != 0 for end in exits)
        if fails_now and job.on_death is OnDeath.STOP_THE_JOB:
            deadline = time.monotonic() + job.grace.total_seconds()
            _send(running.values(), signal.SIGTERM)
        received = _wait_for_signal(watched, deadline)
        if received is None:
            deadline = None
            _send(running.values(), signal.SIGKILL)
        elif received in FORWARDED:
            _send(running.values(), received)
            if received == signal.SIGINT:  # nobody wants to wait for long
                _send(running.values(), signal.SIGCONT)  # a stopped one, too, is to clean up
                deadline = time.monotonic() + job.grace.total_seconds()


def _wait_for_signal(watched: set[signal.Signals], deadline: float | None) -> int | None:
    """Returns the next signal, or None when the deadline has passed without one."""
    if deadline is None:
        return signal.sigwaitinfo(watched).si_signo
    left_s = max(0.0, deadline - time.monotonic())
    received = signal.sigtimedwait(watched, left_s)
    return None if received is None else received.si_signo


def _send(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        process.send_signal(number)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement launch`."""
    parser.usage = (
        "moevement launch -n N [-s S] [--log-dir DIR] [--metrics-address HOST:PORT] [--json] "
        "-- FLAGS..."
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, help="active ranks")
    parser.add_argument("-s", "--spares", type=int, default=0, help="ranks that stand by")
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="write rank_R.log files there, not to here"
    )
    parser.add_argument(
        "--program", type=Path, default=PROGRAM, help="what a rank runs (default: pretrain_moe.py)"
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        metavar="SECONDS",
        default=GRACE.total_seconds(),
        help="until SIGKILL when a rank has failed, or after Ctrl-C",
    )
    add_metrics_address(parser)
    add_json_flag(parser, "how the job ended as JSON, and what the ranks print on standard error")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="those of the program")


def run(args: argparse.Namespace) -> int:
    """Runs the job that the command line describes and returns its exit code.

    What its end is reported as to people is a line of the log, so only programs are shown more.
    """
    if args.ranks < 1 or args.spares < 0 or args.grace_s < 0:
        args.parser.error("-n must be at least 1, -s and --grace-s at least 0")
    grace = timedelta(seconds=args.grace_s)
    job = Job(
        *(args.ranks, args.spares, args.program, tuple(args.flags), grace, args.log_dir),
        metrics_address=args.metrics_address,
    )
    with document_alone(args):
        end = launch(job)
    show(args, end_document(end), [])
    return end.code


def main(argv: Sequence[str] | None = None) -> int:
    """Does what `moevement launch` does, for those who have no `moevement` on their path."""
    parser = Parser(prog=NAME, description=DESCRIPTION)
    parser.set_defaults(parser=parser)
    add_flags(parser)
    try:
        return run(parser.parse_args(argv))
    except UserError as error:
        for message in error.messages:
            print(f"{NAME}: {message}", file=sys.stderr)
        return ExitCode.BAD_ARGUMENTS


if __name__ == "__main__":
    sys.exit(main())
