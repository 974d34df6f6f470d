# SPDX-License-Identifier: Apache-2.0
"""`moevement ended`: says how a process of a job ended, for launchers of other programs."""

from __future__ import annotations

import argparse
import time
from datetime import timedelta

from megatron_moevement.cli.job_end import describe_status, event_dir_of
from megatron_moevement.cli.output import add_json_flag, show
from megatron_moevement.errors import ExitCode, UserError
from megatron_moevement.runtime.interrupts.open_sockets import is_listening
from megatron_moevement.runtime.observation.process_events import Child, tell_end
from megatron_moevement.settings.launch import LAUNCH_VARIABLE, Launch

HELP = "record how a process of a job ended, for those that go on and among its events"
DESCRIPTION = """
Records how a process of a job ended: one that a signal killed can't do it. A launcher calls it in
the environment that the process had, on its machine. Where that names the control store of
in-process restart, the processes that go on no longer wait for an answer of the one that has
ended. Where --moevement-event-dir names a folder, the end is recorded there.
"""
_PATIENCE = timedelta(seconds=10)
_SIGNAL_BASE = 128
_MOST = 255


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moevement ended`."""
    parser.usage = "moevement ended --code N [--begun SECONDS] [--json] -- FLAGS..."
    parser.add_argument("--code", type=int, required=True, help="as a shell reports it")
    parser.add_argument(
        "--begun",
        type=float,
        metavar="SECONDS",
        help="when the process was started, since the epoch (default: now)",
    )
    add_json_flag(parser, "what was recorded, and where, as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="those of the program")


def run(args: argparse.Namespace) -> int:
    """Records it.

    Raises:
        UserError: the environment names no launch, or the code is none.
    """
    if not 0 <= args.code <= _MOST:
        raise UserError(f"--code {args.code} must be from 0 to {_MOST}, as a shell reports it")
    launch = Launch.from_environment()
    if launch.name is None:
        raise UserError(f"{LAUNCH_VARIABLE} is not set; set it as for the process that has ended")
    begun_s = time.time() if args.begun is None else args.begun
    child = Child(launch.name, launch.process, None, begun_s)
    status = status_of(args.code)
    folder = event_dir_of(args.flags)
    noted = _note_gone(launch, status)  # first: survivors wait for it, and a folder may not answer
    document = {
        "launch": launch.name,
        "process": launch.process,
        "code": status,
        "end": describe_status(status),
        "event_dir": folder if tell_end(folder, child, status) else None,
        "noted": noted,
    }
    show(args, document, [])
    return ExitCode.DONE


def _note_gone(launch: Launch, status: int) -> bool:
    """Notes in the control store, if it is still served, that a process has ended.

    Returns:
        Whether it is noted there.
    """
    if launch.control_store is None or launch.secret is None:
        return False
    # They import torch.
    from megatron_moevement.runtime.coordination.meeting import store_at  # noqa: PLC0415
    from megatron_moevement.runtime.coordination.roll_call import note_gone  # noqa: PLC0415

    if not is_listening(*launch.control_store, _PATIENCE):
        return False  # the job has ended, too
    try:
        store = store_at(launch.control_store, _PATIENCE)
    except UserError:  # it ends meanwhile
        return False
    end = describe_status(status)
    note_gone(store, launch.process, launch.secret, launch.attempt, end=end)
    return True


def status_of(code: int) -> int:
    """Returns the exit code of a process, negative for a signal, of what a shell reports."""
    is_own = code <= _SIGNAL_BASE or code == ExitCode.INTERRUPTED
    return code if is_own else _SIGNAL_BASE - code
