"""`moevement stores`: hosts the two stores of a job outside of its ranks, for launchers that don't.

A batch script starts it beside the ranks, on the machine that `MASTER_ADDR` names. It is the only
process of a job with in-process restart whose death ends all others; another launch goes on from
their memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket

from megatron_moevement.cli.launch import serve_store
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.settings.secret import SECRET_VARIABLE, new_secret

HELP = "host the stores of a job outside of its ranks"
DESCRIPTION = """
Hosts training's store and the control store of in-process restart until it gets SIGTERM or Ctrl-C.
Prints what the ranks need in their environment. A secret is among it, unless MOEVEMENT_SECRET is
set: then it stays where it is. A program that has it can take part in the job.
"""
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


def run(args: argparse.Namespace) -> int:
    """Hosts the stores until a signal comes.

    Raises:
        UserError: nothing can listen there.
    """
    # A signal that is ignored from the start stays so: a batch system may send it to all steps.
    ends = {number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    ports = (args.port, args.port + 1 if args.port else 0)
    with contextlib.ExitStack() as stack:
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
        shown = "".join(f" {name}={port}" for name, port in found.items())
        # `ft_launcher` sets its own MASTER_ADDR and MASTER_PORT; these names win over them.
        shown += f" MOEVEMENT_STORE_ADDR={args.interface} MOEVEMENT_STORE_PORT={found[names[0]]}"
        if not os.environ.get(SECRET_VARIABLE):
            shown += f" {SECRET_VARIABLE}={new_secret()}"
        print(f"MASTER_ADDR={args.interface}{shown} TORCHELASTIC_USE_AGENT_STORE=True", flush=True)
        signal.sigwait(ends)
        del stores
    return ExitCode.DONE
