# SPDX-License-Identifier: Apache-2.0
"""`moevement stores`: hosts the two stores of a job outside of its ranks, for launchers that don't.

A batch script starts it beside the ranks, on the machine that `MASTER_ADDR` names. It is the only
process of a job with in-process restart whose death ends all others; another launch goes on from
their memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import secrets
import signal
import socket
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron_moevement.cli.job_end import event_dir_of
from megatron_moevement.cli.metrics import add_metrics_address, open_metrics
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.runtime.observation.log import open_log
from megatron_moevement.settings.launch import LAUNCH_VARIABLE, Address
from megatron_moevement.settings.secret import SECRET_VARIABLE, new_secret

if TYPE_CHECKING:
    from megatron_moevement.runtime.coordination.roll_call import Store

HELP = "host the stores of a job outside of its ranks"
DESCRIPTION = """
Hosts training's store and the control store of in-process restart until it gets SIGTERM or Ctrl-C.
Prints what the ranks need in their environment. A secret is among it, unless MOEVEMENT_SECRET is
set: then it stays where it is. A program that has it can take part in the job.
"""
CONNECTIONS_OF_A_PROCESS = 4
"""To both stores and by its monitor; one more, for a new one may come before an old one is gone."""
FILES_BESIDES = 64
_ENDS = {signal.SIGTERM, signal.SIGINT}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement stores`."""
    parser.add_argument(
        "--interface", default="127.0.0.1", metavar="ADDRESS", help="to listen on; an IPv4 address"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="of training's store; the control store takes the next one (default: free ones)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="of the job, spares counted: whether the limit of open files allows them is checked",
    )
    add_metrics_address(parser)
    add_json_flag(parser, "what the ranks need as JSON, in one line")
    parser.add_argument(
        "--event-dir",
        metavar="DIR",
        help="the job's --moevement-event-dir, for its metrics (default: that of FLAGS)",
    )
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="those of the job, after --")


def run(args: argparse.Namespace) -> int:
    """Hosts the stores until a signal comes.

    Raises:
        UserError: nothing can listen there, too few files may be open for the job, or metrics are
            asked for without events.
    """
    allow_connections(args.processes)
    # A signal that is ignored from the start stays so: a batch system may send it to all steps.
    ends = {number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    ports = (args.port, args.port + 1 if args.port else 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(open_log("moevement stores", "stores"))
        event_dir = args.event_dir or event_dir_of(args.flags)
        metrics = open_metrics(stack, args.metrics_address, event_dir)
        try:
            listeners = [
                stack.enter_context(socket.create_server((args.interface, port), backlog=1024))
                for port in ports
            ]
        except (OSError, OverflowError) as error:
            raise UserError(f"can't listen on {args.interface}, ports {ports}: {error}") from error
        names = ("MASTER_PORT", "MOEVEMENT_CONTROL_PORT")
        found = {name: each.getsockname()[1] for name, each in zip(names, listeners, strict=True)}
        stores = [serve_store(listener, args.interface) for listener in listeners]
        needed = _needed(args.interface, found)
        words = " ".join(f"{name}={value}" for name, value in needed.items())
        show(args, needed, [words], in_a_line=True)
        metrics()
        signal.sigwait(ends)
        del stores
    return ExitCode.DONE


def _needed(interface: str, ports: Mapping[str, int]) -> dict[str, str]:
    """Returns what the ranks need in their environment."""
    needed = {"MASTER_ADDR": interface, **{name: str(port) for name, port in ports.items()}}
    # `ft_launcher` sets its own MASTER_ADDR and MASTER_PORT; these names win over them.
    needed["MOEVEMENT_STORE_ADDR"] = interface
    needed["MOEVEMENT_STORE_PORT"] = needed["MASTER_PORT"]
    if not os.environ.get(SECRET_VARIABLE):
        needed[SECRET_VARIABLE] = new_secret()
    if not os.environ.get(LAUNCH_VARIABLE):
        needed[LAUNCH_VARIABLE] = secrets.token_hex(4)
    return {**needed, "TORCHELASTIC_USE_AGENT_STORE": "True"}


@contextlib.contextmanager
def served_at(address: Address) -> Iterator[None]:
    """Serves training's store at an address, unless somebody does so already."""
    stores = []
    with contextlib.suppress(OSError):
        listener = socket.create_server(address, backlog=1024)
        stores.append(serve_store(listener, address[0]))
    yield
    stores.clear()


def allow_connections(processes: int) -> None:
    """Lets this process have as many open files as it may, for the connections to its stores.

    Args:
        processes: how many the job has, spares counted.

    Raises:
        UserError: they are too few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = processes * CONNECTIONS_OF_A_PROCESS + FILES_BESIDES
    if resource.RLIM_INFINITY != most < needed:
        raise UserError(
            f"the stores of {processes} processes need {needed} open files, and the hard limit is "
            f"{most}: raise it (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve_store(listener: socket.socket, address: str) -> Store:
    """Serves torch's TCPStore on a listening socket until the returned object is dropped.

    The socket is IPv4: for IPv6 ones the server's only thread looks up every peer's name.
    """
    # Which package brings NVIDIA's management library is torch's concern.
    warnings.filterwarnings("ignore", message="The pynvml package", category=FutureWarning)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
